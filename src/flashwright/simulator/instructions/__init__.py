"""The instruction families. Importing this package registers all of them with `registry`."""

from . import (
    arithmetic,
    async_copy,
    atomics,
    barriers,
    bitwise,
    compare,
    control,
    conversion,
    floating,
    half,
    load_store,
    matrix,
    mma,
    moves,
    special_functions,
    warp,
)

__all__ = [
    "arithmetic",
    "async_copy",
    "atomics",
    "barriers",
    "bitwise",
    "compare",
    "control",
    "conversion",
    "floating",
    "half",
    "load_store",
    "matrix",
    "mma",
    "moves",
    "special_functions",
    "warp",
]
