"""Approximate functions of f32 (and rsqrt of f64), computed as precisely as NumPy does.

Hardware's results differ in the last bits (at most 2 ulp for ex2, 1 for rcp; see the PTX ISA for each); the
simulator gives the rounded result of a double computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..binding import Binder, data_type
from ..numerics import F32, F64
from ..ptx.syntax import Instruction
from ..registry import instruction
from .floating import with_modifiers

Execute = Callable[..., Any]

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
}


@instruction("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", types=("f32", "f64"))
def approximate(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    function = _FUNCTIONS[syntax.root]

    def compute(a: Any) -> Any:
        return function(a.astype(F64)).astype(F32) if ptx_type.bits == 32 else function(a)

    return bind.elementwise(syntax, with_modifiers(syntax, ptx_type, compute), ptx_type, ptx_type)
