"""The syntax tree of a PTX module. Values only; names are already unique within their function."""

from __future__ import annotations

from dataclasses import dataclass, field

from .types import PtxType


@dataclass(frozen=True)
class SourceLocation:
    """A place in the CUDA source, and, for an inlined function, the call site it was inlined at."""

    file: str
    line: int
    column: int
    inlined_at: SourceLocation | None = None

    @property
    def outermost(self) -> SourceLocation:
        """The line of the kernel itself that leads here."""
        return self if self.inlined_at is None else self.inlined_at.outermost

    def __str__(self) -> str:
        here = f"{self.file}:{self.line}"
        return here if self.inlined_at is None else f"{here} (inlined at {self.inlined_at})"


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal. ``bits`` is set for the exact forms 0fXXXXXXXX / 0dXXXXXXXXXXXXXXXX (with their width)."""

    value: int | float
    bits: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class Symbol:
    """A variable's or label's or function's name used as an operand, plus a constant offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base + offset]``."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    """``{a, b, …}``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``d|p``: a result and a predicate (or two predicates)."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """``!p`` as a source operand."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """``_``: a result that is not wanted."""


@dataclass(frozen=True)
class Arguments:
    """A parenthesised list of a call."""

    elements: tuple[Operand, ...]


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Not | Sink | Arguments


@dataclass(frozen=True)
class Guard:
    """``@p`` or ``@!p``."""

    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    ptx_line: int
    text: str
    source: SourceLocation | None

    @property
    def root(self) -> str:
        """``ld`` of ``ld.global.f32``."""
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Everything after the root, without dots."""
        return tuple(self.opcode.split(".")[1:])

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Variable:
    """A variable of a state space. ``pointers`` in its content: (offset, symbol, addend, is generic)."""

    name: str
    space: str
    type: PtxType
    align: int
    size: int
    initial: bytes | None = None
    pointers: tuple[tuple[int, str, int, bool], ...] = ()
    is_extern: bool = False


@dataclass
class Function:
    name: str
    is_entry: bool
    returns: list[Variable]
    parameters: list[Variable]
    body: list[Instruction | Label] | None = None
    registers: dict[str, PtxType] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    branch_targets: dict[str, list[str]] = field(default_factory=dict)
    call_targets: dict[str, list[str]] = field(default_factory=dict)
    limits: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unsupported: list[tuple[int, str, str]] = field(default_factory=list)  # PTX line, text, why


@dataclass
class ModuleSyntax:
    version: str = ""
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
