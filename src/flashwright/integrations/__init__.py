"""Flashwright where others expect something else: PyTorch's operators and SDPA, `flash_attn`, and transformers."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def warn_once(reason: str) -> None:
    """Warns the first time a reason comes up in this process; says nothing while a graph is traced."""
    import torch

    if torch.compiler.is_compiling() or reason in _said:
        return
    _said.add(reason)
    warnings.warn(reason, stacklevel=3)
