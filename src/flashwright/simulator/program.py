"""From a kernel's syntax tree to a flat list of bound operations.

Device functions are expanded at their call sites, each with its own registers and its parameters in per-
thread memory. So a program is one straight list of operations, a program counter is an index into it, and
threads of a divergent call meet again right after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from . import instructions as _families  # noqa: F401  (importing it registers the instruction families)
from .binding import CARRY_FLAG, Binder, Slot, SymbolAddress
from .control_flow import END, ControlFlow
from .errors import SimulationError
from .instructions.run_time import RUN_TIME_FUNCTIONS
from .memory.windows import CALL_PARAMETER_BASE
from .memory_order import STRONG_MODIFIERS
from .ptx.syntax import (
    Arguments,
    Function,
    Instruction,
    Label,
    ModuleSyntax,
    Register,
    SourceLocation,
    Symbol,
    Variable,
)
from .ptx.types import TYPES
from .register_watch import announcing, wgmma_registers
from .registry import Operation, Unsupported, decode
from .special_registers import SPECIAL_REGISTERS

_MAX_CALL_DEPTH = 64
# Opcodes of what touches shared memory beside the threads, and of what they wait in for it.
_ASYNCHRONOUS = ("mbarrier.", "wgmma.", "cp.async.bulk.", "cp.reduce.async.bulk.")


@dataclass(frozen=True)
class BoundInstruction:
    """One executable instruction and where it came from."""

    operation: Operation
    guard: int  # slot of the guard predicate, -1 without one
    guard_negated: bool
    opcode: str
    text: str
    ptx_line: int
    source: SourceLocation | None

    def skip_to(self, pc: int) -> int:
        """Where threads go whose guard is false, from the instruction's place in the program."""
        return pc + 1 if self.operation.skip_to is None else self.operation.skip_to

    def successors(self, pc: int) -> tuple[int, ...]:
        """Where threads can go from here; END: they end."""
        targets = (pc + 1,) if self.operation.targets is None else self.operation.targets or (END,)
        return targets if self.guard < 0 or self.skip_to(pc) in targets else (*targets, self.skip_to(pc))


@dataclass
class Program:
    """A kernel ready to run."""

    name: str
    parameters: list[Variable]
    code: list[BoundInstruction] = field(default_factory=list)
    flow: ControlFlow = field(default_factory=lambda: ControlFlow([(END,)]))
    slots: list[Slot] = field(default_factory=list)
    special_slots: dict[str, int] = field(default_factory=dict)
    static_shared_bytes: int = 0
    dynamic_shared_offset: int = 0
    local_bytes: int = 0
    shared_granule: int = 16
    global_granule: int = 16
    wgmma_registers: tuple[int, ...] = ()
    limits: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def shared_bytes(self, dynamic: int) -> int:
        """Shared memory of a block that is launched with ``dynamic`` bytes."""
        return self.dynamic_shared_offset + dynamic if dynamic else self.static_shared_bytes

    @cached_property
    def has_asynchronous_parties(self) -> bool:
        """Whether bulk copies or warpgroup products touch shared memory beside the threads."""
        return any(item.opcode.startswith(_ASYNCHRONOUS) for item in self.code)

    @cached_property
    def has_global_flags(self) -> bool:
        """Whether strong accesses, by which thread blocks can tell each other something, may go to global memory."""
        return any(_may_be_global_flag(item.opcode.split(".")) for item in self.code)

    @cached_property
    def steps(self) -> list[tuple[Callable[..., Any], int, bool, bool, int, int]]:
        """For the run loop: execute, guard slot, guard negated, is control, where to skip to, place in the order."""
        return [
            (
                item.operation.execute,
                item.guard,
                item.guard_negated,
                item.operation.is_control,
                item.skip_to(pc),
                order,
            )
            for pc, (item, order) in enumerate(zip(self.code, self.flow.order, strict=True))
        ]


@dataclass
class _Instance:
    """One expansion of a function: its private names."""

    function: Function
    prefix: str
    symbols: dict[str, SymbolAddress]
    start: int
    callers: tuple[str, ...]  # functions that it was expanded in, and itself
    labels: dict[str, int] = field(default_factory=dict)
    return_to: int | None = None


@dataclass
class _Flat:
    syntax: Instruction
    instance: _Instance
    callees: dict[str, _Instance] = field(default_factory=dict)
    call_end: int | None = None


class ProgramBuilder:
    """Flattens, lays out and binds one kernel of a module."""

    def __init__(self, module: ModuleSyntax, entry: Function, module_symbols: dict[str, SymbolAddress]) -> None:
        self.module = module
        self.entry = entry
        self.program = Program(entry.name, list(entry.parameters), limits=entry.limits)
        self.module_symbols = dict(module_symbols)
        self.flat: list[_Flat] = []
        self.slot_by_name: dict[str, Slot] = {}
        self.instances = 0
        self.problems: dict[tuple[int | None, str], Instruction | None] = {}  # (PTX line, reason) → instruction

    def build(self) -> Program:
        self._lay_out_module_shared()
        kernel_parameters = {}
        offset = 0
        for variable in self.entry.parameters:
            offset = align_up(offset, variable.align)
            kernel_parameters[variable.name] = SymbolAddress("param", offset)
            offset += variable.size
        self._expand(self.entry, kernel_parameters, ())
        self._bind_all()
        self.program.flow = ControlFlow([item.successors(pc) for pc, item in enumerate(self.program.code)])
        return self.program

    # Layout ------------------------------------------------------------------------------------------

    def _lay_out_module_shared(self) -> None:
        for variable in self.module.variables:
            if variable.space == "shared" and not variable.is_extern:
                self.module_symbols[variable.name] = SymbolAddress("shared", self._place_shared(variable))

    def _place_shared(self, variable: Variable) -> int:
        offset = align_up(self.program.static_shared_bytes, variable.align)
        self.program.static_shared_bytes = offset + variable.size
        return offset

    def _place_local(self, variable: Variable) -> int:
        offset = align_up(self.program.local_bytes, max(variable.align, 8))
        self.program.local_bytes = offset + variable.size
        return offset

    def _place_dynamic_shared(self) -> None:
        """All extern shared arrays begin at the same place: after the static ones."""
        externs = [v for v in self.module.variables if v.space == "shared" and v.is_extern]
        offset = align_up(self.program.static_shared_bytes, max([16, *(v.align for v in externs)]))
        if not self.program.static_shared_bytes:
            offset = 0
        self.program.dynamic_shared_offset = offset
        for variable in externs:
            self.module_symbols[variable.name] = SymbolAddress("shared", offset)

    # Expansion ---------------------------------------------------------------------------------------

    def _expand(self, function: Function, symbols: dict[str, SymbolAddress], callers: tuple[str, ...]) -> _Instance:
        prefix = f"{self.instances}:" if callers else ""
        instance = _Instance(function, prefix, dict(symbols), len(self.flat), (*callers, function.name))
        self.instances += 1
        for variable in function.variables:
            if variable.space == "shared":
                address = SymbolAddress("shared", self._place_shared(variable))
            elif variable.space == "local":
                address = SymbolAddress("local", self._place_local(variable))
            elif variable.space == "param":
                address = SymbolAddress("param", CALL_PARAMETER_BASE + self._place_local(variable))
            else:
                self._refuse(None, f".{variable.space} variable {variable.name} inside a function")
                continue
            instance.symbols[variable.name] = address
        for line, text, reason in function.unsupported:
            self._refuse(Instruction(text, (), None, line, text, None), reason)
        assert function.body is not None
        for statement in function.body:
            if isinstance(statement, Label):
                instance.labels[statement.name] = len(self.flat)
                continue
            flat = _Flat(statement, instance)
            self.flat.append(flat)
            if statement.root == "call":
                try:
                    flat.callees = self._expand_call(statement, instance)
                except Unsupported as reason:
                    self._refuse(statement, str(reason))
                except (IndexError, KeyError):
                    self._refuse(statement, "operands of a form that the simulator does not know")
                flat.call_end = len(self.flat)
                for callee in flat.callees.values():
                    callee.return_to = flat.call_end
        return instance

    def _expand_call(self, call: Instruction, caller: _Instance) -> dict[str, _Instance]:
        """The callee, or all that a pointer may mean, one after the other."""
        lists = [operand.elements for operand in call.operands if isinstance(operand, Arguments)]
        has_result = bool(call.operands) and isinstance(call.operands[0], Arguments)
        returned = lists.pop(0) if has_result else ()
        passed = lists.pop(0) if lists else ()
        target = call.operands[1 if has_result else 0]
        actuals = [*returned, *passed]
        if isinstance(target, Register):
            callees = self._pointer_targets(call, caller, len(returned), len(passed))
        elif isinstance(target, Symbol) and target.name in self.module.functions:
            callees = [self.module.functions[target.name]]
            if callees[0].body is None:
                if target.name in RUN_TIME_FUNCTIONS:
                    return {}
                raise Unsupported(f"call of external function {target.name}")
            if len(caller.callers) > _MAX_CALL_DEPTH or target.name in caller.callers:
                raise Unsupported(f"recursion, or more than {_MAX_CALL_DEPTH} nested calls")
        else:
            raise Unsupported("call of an unknown function")
        if not all(isinstance(actual, Symbol) for actual in actuals):
            raise Unsupported("call with arguments that are not .param variables")
        expanded = {}
        for callee in callees:
            formals = [*callee.returns, *callee.parameters]
            if len(formals) != len(actuals):
                raise Unsupported(f"{len(actuals)} arguments and results; {callee.name} has {len(formals)}")
            symbols = {
                formal.name: caller.symbols[actual.name]
                for formal, actual in zip(formals, actuals, strict=True)
                if isinstance(actual, Symbol)
            }
            instance = self._expand(callee, symbols, caller.callers)
            expanded[callee.name] = instance
            if isinstance(target, Register):  # what runs off its end must not run into the next one
                self.flat.append(_Flat(replace(call, opcode="ret", operands=(), guard=None, text="ret"), instance))
        return expanded

    def _pointer_targets(self, call: Instruction, caller: _Instance, returns: int, parameters: int) -> list[Function]:
        """Functions that a pointer may mean: listed by .calltargets, or of that many results and arguments.

        Those that are being expanded are left out: they would be recursion (see `instructions.control.call`).
        """
        label = call.operands[-1]
        listed = caller.function.call_targets.get(label.name, ()) if isinstance(label, Symbol) else ()
        names = listed or _functions_with_address(self.module)
        functions = [self.module.functions[name] for name in names if name in self.module.functions]
        return [
            function
            for function in functions
            if function.body is not None
            and (len(function.returns), len(function.parameters)) == (returns, parameters)
            and function.name not in caller.callers
        ]

    # Binding -----------------------------------------------------------------------------------------

    def _bind_all(self) -> None:
        self._place_dynamic_shared()
        # Running off the end of a kernel ends the thread.
        end = Instruction("exit", (), None, self.flat[-1].syntax.ptx_line if self.flat else 0, "exit", None)
        root = self.flat[0].instance if self.flat else _Instance(self.entry, "", {}, 0, ())
        binders = []
        for pc, flat in enumerate([*self.flat, _Flat(end, root)]):
            try:
                instruction, binder = self._bind(pc, flat)
            except Unsupported as reason:
                self._refuse(flat.syntax, str(reason))
                continue
            self.program.code.append(instruction)
            binders.append(binder)
        if self.problems:
            raise self._refusal()
        self.program.shared_granule = min(set().union(*(binder.shared_widths for binder in binders)), default=16)
        self.program.global_granule = min(set().union(*(binder.global_widths for binder in binders)), default=16)
        self._watch_wgmma_registers(binders)

    def _watch_wgmma_registers(self, binders: list[Binder]) -> None:
        """Ordinary instructions announce their accesses to registers that a wgmma may have in flight."""
        slots = wgmma_registers(binders)
        self.program.wgmma_registers = tuple(sorted(slots))
        for pc, binder in enumerate(binders):
            if slots & binder.touched and not binder.wgmma_registers:
                item = self.program.code[pc]
                operation = replace(item.operation, execute=announcing(item.operation.execute, binder, slots))
                self.program.code[pc] = replace(item, operation=operation)

    def _bind(self, pc: int, flat: _Flat) -> tuple[BoundInstruction, Binder]:
        syntax, instance = flat.syntax, flat.instance
        is_kernel_body = instance.function.is_entry
        binder = Binder(
            slot_of=self._slot_resolver(instance),
            symbol_of=self._symbol_resolver(instance),
            label_of=lambda name: instance.labels[name],
            branch_targets=lambda name: [instance.labels[label] for label in instance.function.branch_targets[name]],
            return_target=None if is_kernel_body else instance.return_to,
            call_end=pc + 1 if flat.call_end is None else flat.call_end,
            callees={self.module_symbols[name].offset: callee.start for name, callee in flat.callees.items()},
            pc=pc,
        )
        operation = decode(syntax, binder)
        guard = self._slot_resolver(instance)(syntax.guard.register.name).index if syntax.guard else -1
        instruction = BoundInstruction(
            operation,
            guard,
            bool(syntax.guard and syntax.guard.negated),
            syntax.opcode,
            syntax.text,
            syntax.ptx_line,
            syntax.source,
        )
        return instruction, binder

    def _slot_resolver(self, instance: _Instance) -> Callable[[str], Slot]:
        def slot_of(name: str) -> Slot:
            register_type = instance.function.registers.get(name)
            if register_type is not None:
                key = instance.prefix + name
            elif name in SPECIAL_REGISTERS:
                key, register_type = name, SPECIAL_REGISTERS[name].type
            elif name == CARRY_FLAG:
                key, register_type = instance.prefix + name, TYPES["pred"]
            else:
                raise Unsupported(f"register {name}")
            slot = self.slot_by_name.get(key)
            if slot is None:
                slot = Slot(len(self.program.slots), register_type)
                self.slot_by_name[key] = slot
                self.program.slots.append(slot)
                if key in SPECIAL_REGISTERS:
                    self.program.special_slots[key] = slot.index
            return slot

        return slot_of

    def _symbol_resolver(self, instance: _Instance) -> Callable[[str], SymbolAddress]:
        def symbol_of(name: str) -> SymbolAddress:
            address = instance.symbols.get(name) or self.module_symbols.get(name)
            if address is None:
                raise Unsupported(f"symbol {name}")
            return address

        return symbol_of

    # Refusal -----------------------------------------------------------------------------------------

    def _refuse(self, syntax: Instruction | None, reason: str) -> None:
        """One more thing of the kernel that cannot be executed; each line of PTX is named once."""
        line = None if syntax is None else syntax.ptx_line
        self.problems.setdefault((line, reason), syntax)

    def _refusal(self) -> SimulationError:
        problems = sorted(self.problems.items(), key=lambda item: item[0][0] or 0)
        described = [reason if syntax is None else f"`{syntax.text}`: {reason}" for (_, reason), syntax in problems]
        detail = described[0]
        if len(described) > 1:
            places = ["kernel" if line is None else f"PTX line {line}" for (line, _), _ in problems]
            lines = [f"\n    {place}: {text}" for place, text in zip(places, described, strict=True)]
            detail = f"{len(lines)} things that the simulator does not execute:{''.join(lines)}"
        first = problems[0][1]
        if first is None:
            return SimulationError("unsupported", detail, kernel=self.entry.name)
        source = first.source
        return SimulationError(
            "unsupported",
            detail,
            kernel=self.entry.name,
            ptx_line=first.ptx_line,
            source_line=source.line if source else None,
            source_file=source.file if source else None,
            source_location=str(source) if source else None,
            instruction=first.text,
        )


def _may_be_global_flag(opcode: list[str]) -> bool:
    root, *modifiers = opcode
    is_strong = root in ("atom", "red") or (root in ("ld", "st") and not STRONG_MODIFIERS.isdisjoint(modifiers))
    return is_strong and not any(modifier.startswith("shared") for modifier in modifiers)


def _functions_with_address(module: ModuleSyntax) -> list[str]:
    """Device functions whose address a variable holds or an instruction takes."""
    found = {target for variable in module.variables for _, target, _, _ in variable.pointers}
    for function in module.functions.values():
        for statement in function.body or ():
            if isinstance(statement, Instruction) and statement.root != "call":
                found |= {operand.name for operand in statement.operands if isinstance(operand, Symbol)}
    return [name for name, function in module.functions.items() if name in found and not function.is_entry]


def align_up(value: int, alignment: int) -> int:
    return -(-value // max(alignment, 1)) * max(alignment, 1)
