"""The facts about one config, and the pictures drawn from them."""

from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.gather import explain_config

__all__ = ["ConfigFacts", "explain_config"]
