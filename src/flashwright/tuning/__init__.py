"""Finding the fastest config for a GPU and a problem, and remembering it.

`attention()` looks results up by `lookup`; `flashwright tune` makes them: `candidates` compiles what is worth trying,
`measure` checks and times it on the GPU, `search` decides what to time, `journal` and `database` keep it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["database_status", "reload"]


def reload() -> None:
    """Makes `attention()` choose anew, by the results that are stored now."""
    from flashwright.attention import forget_plans
    from flashwright.defaults import forget_choices
    from flashwright.tuning.lookup import forget_results

    forget_results()
    forget_choices()
    forget_plans()


def database_status() -> dict[str, Any]:
    """What there is of the user's tuning database (`DatabaseStatus`); looks without changing anything."""
    from flashwright.tuning.database import TuningDatabase

    return TuningDatabase().status().to_dict()
