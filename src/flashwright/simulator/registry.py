"""Where instruction families announce themselves: opcode root → decoder.

A decoder turns one parsed instruction into an `Operation` when a kernel is loaded, with operands, types and
modes already resolved; what it does not understand it refuses with `Unsupported`, so that nothing is
discovered in the middle of a run. Adding a family is adding a module to `instructions/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .ptx.types import TYPES

if TYPE_CHECKING:
    from .binding import Binder
    from .ptx.syntax import Instruction

# What a control operation returns when the running threads cannot go on (blocked, exited, diverged).
RESCHEDULE = -1


class Unsupported(Exception):
    """Raised by a decoder for a form it does not execute."""


@dataclass(frozen=True)
class Operation:
    """One bound instruction.

    ``execute(wave)`` works on all active threads. A control operation returns the next program counter, or
    RESCHEDULE; any other falls through to the next instruction and its result is ignored.
    """

    execute: Callable[..., Any]
    is_control: bool = False
    tensor_flops: int = 0
    skip_to: int | None = None  # where threads go whose guard is false; None: to the next instruction
    targets: tuple[int, ...] | None = None  # where the others may go; None: to the next instruction, (): they end


Decoder = Callable[["Instruction", "Binder"], Operation | Callable[..., Any]]

# Dotted prefix of the opcode → (data types it is for, decoder); None: every type.
_DECODERS: dict[str, list[tuple[frozenset[str] | None, Decoder]]] = {}


def instruction(*prefixes: str, types: Iterable[str] | None = None) -> Callable[[Decoder], Decoder]:
    """Register a decoder for opcodes that begin with one of ``prefixes`` (``ld``, ``cp.async``).

    The longest matching prefix wins. ``types`` limits it to instructions whose last type is among them, so
    that integer and floating-point families can share an opcode.
    """
    accepted = None if types is None else frozenset(types)

    def register(decoder: Decoder) -> Decoder:
        for prefix in prefixes:
            _DECODERS.setdefault(prefix, []).append((accepted, decoder))
        return decoder

    return register


def decode(syntax: Instruction, binder: Binder) -> Operation:
    """The operation of one instruction; Unsupported where no family knows it."""
    decoder = _find_decoder(syntax)
    if decoder is None:
        raise Unsupported("unknown instruction")
    try:
        operation = decoder(syntax, binder)
    except Unsupported:
        raise
    except Exception as error:
        # A decoder that runs out of operands or modifiers met a form it was not written for.
        raise Unsupported("operands or modifiers of a form that the simulator does not know") from error
    return operation if isinstance(operation, Operation) else Operation(operation)


def _find_decoder(syntax: Instruction) -> Decoder | None:
    parts = syntax.opcode.split(".")
    last_type = next((part for part in reversed(parts) if part in TYPES), None)
    for length in range(len(parts), 0, -1):
        for accepted, decoder in _DECODERS.get(".".join(parts[:length]), ()):
            if accepted is None or last_type in accepted:
                return decoder
    return None
