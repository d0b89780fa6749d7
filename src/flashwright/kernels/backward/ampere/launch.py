"""How launches of the Ampere backward kernel depend on a problem: one thread block per block of keys."""

from __future__ import annotations

from flashwright.kernels.launch import LaunchRules

RULES = LaunchRules()
