"""Drop-ins for other interfaces: PyTorch's SDPA, `flash_attn` and transformers."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def warn_once(reason: str) -> None:
    """Warns the first time a reason comes up in this process; silent while a graph is traced."""
    import torch

    if torch.compiler.is_compiling() or reason in _said:
        return
    _said.add(reason)
    warnings.warn(reason, stacklevel=3)


def refuse(**requested: bool) -> None:
    """Raises for arguments of other packages that are not at their defaults and that the kernels do not compute."""
    names = [name for name, is_requested in requested.items() if is_requested]
    if names:
        raise NotImplementedError(f"{', '.join(names)}: not supported by flashwright; leave it at its default")
