"""mov, selp, slct, cvta and other instructions that move values without computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import numerics as num
from ..binding import Binder, data_type
from ..memory.windows import SPACE_OF_WINDOW, WINDOW_BASE, WINDOW_BITS
from ..ptx.syntax import Instruction, Register, Sink, Symbol, Vector
from ..ptx.types import TYPES, PtxType
from ..registry import Unsupported, instruction

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]


@instruction("mov")
def mov(syntax: Instruction, bind: Binder) -> Execute:
    target, value = syntax.operands
    ptx_type = data_type(syntax)
    if isinstance(target, Vector):
        return _unpack(target, value, ptx_type, bind)
    if isinstance(value, Vector):
        return _pack(target, value, ptx_type, bind)
    put = bind.destination(target, ptx_type)
    if ptx_type.bits == 32 and isinstance(target, Register):
        source = bind.slot_of(value.name).index if isinstance(value, Register) else None
        bind.rename = source, bind.slot_of(target.name).index
    if isinstance(value, Register):
        get = bind.source(value, ptx_type)
        return lambda wave: put(wave, get(wave))
    scalar = bind.source(value, ptx_type)
    return lambda wave: put(wave, np.full(wave.threads, scalar(wave)))


def _pack(target: Any, value: Vector, ptx_type: PtxType, bind: Binder) -> Execute:
    """``mov.b32 d, {lo, hi}``: the first element is the least significant."""
    part = TYPES[f"b{ptx_type.bits // len(value.elements)}"]
    getters = [bind.source(element, part) for element in value.elements]
    put = bind.destination(target, ptx_type)
    whole = ptx_type.raw

    def execute(wave: Wave) -> None:
        packed = np.empty((wave.threads, len(getters)), part.raw)
        for index, get in enumerate(getters):
            packed[:, index] = get(wave)
        put(wave, packed.view(whole).ravel())

    return execute


def _unpack(target: Vector, value: Any, ptx_type: PtxType, bind: Binder) -> Execute:
    count = len(target.elements)
    part = TYPES[f"b{ptx_type.bits // count}"]
    setters = [
        (index, bind.destination(element, part))
        for index, element in enumerate(target.elements)
        if not isinstance(element, Sink)
    ]
    get = bind.source(value, TYPES[f"b{ptx_type.bits}"])
    if part.bits == 16 and count == 2 and isinstance(value, Register):
        halves = (bind.slot_of(item.name).index if isinstance(item, Register) else None for item in target.elements)
        bind.unpacks = bind.slot_of(value.name).index, tuple(halves)

    def execute(wave: Wave) -> None:
        whole = get(wave)
        if whole.ndim == 0:
            whole = np.full(wave.threads, whole)
        parts = np.ascontiguousarray(whole).view(part.raw).reshape(-1, count)
        for index, put in setters:
            put(wave, np.ascontiguousarray(parts[:, index]))

    return execute


@instruction("selp")
def selp(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    put = bind.destination(syntax.operands[0], ptx_type)
    get_a, get_b = (bind.source(operand, ptx_type) for operand in syntax.operands[1:3])
    choose = bind.predicate(syntax.operands[3])
    return lambda wave: put(wave, np.where(choose(wave), get_a(wave), get_b(wave)))


@instruction("slct")
def slct(syntax: Instruction, bind: Binder) -> Execute:
    """d = c >= 0 ? a : b; NaN chooses b."""
    value_type, sign_type = (TYPES[name] for name in [m for m in syntax.modifiers if m in TYPES][:2])
    flush = syntax.has("ftz")

    def choose(a: Any, b: Any, c: Any) -> Any:
        return np.where((num.flush_subnormals(c) if flush else c) >= 0, a, b)

    return bind.elementwise(syntax, choose, value_type, value_type, value_type, sign_type)


@instruction("cvta")
def cvta(syntax: Instruction, bind: Binder) -> Execute:
    """Between an address in a state space and a generic address."""
    space = next(m for m in syntax.modifiers if m.split("::")[0] in WINDOW_BASE).split("::")[0]
    ptx_type = data_type(syntax)
    base = np.array(WINDOW_BASE[space] % (1 << ptx_type.bits), ptx_type.dtype)
    sign = -1 if syntax.has("to") else 1
    put = bind.destination(syntax.operands[0], ptx_type)
    source = syntax.operands[1]
    if isinstance(source, Symbol):
        variable = bind.symbol_address(source, ptx_type.dtype)
        return lambda wave: put(wave, np.full(wave.threads, variable(wave) + base))
    get = bind.source(source, ptx_type)
    if not base:
        return lambda wave: put(wave, get(wave))
    if sign > 0:
        return lambda wave: put(wave, get(wave) + base)
    return lambda wave: put(wave, get(wave) - base)


@instruction("mapa")
def mapa(syntax: Instruction, bind: Binder) -> Execute:
    """The address of a shared variable in a block of the cluster."""
    ptx_type = data_type(syntax)
    put, get = bind.destination(syntax.operands[0], ptx_type), bind.source(syntax.operands[1], ptx_type)
    (get_rank,) = bind.sources(syntax.operands[2:], TYPES["u32"])

    def execute(wave: Wave) -> None:
        ranks = get_rank(wave)
        elsewhere = (ranks >= wave.clusters.size) & wave.active_mask
        if elsewhere.any():
            thread = int(np.flatnonzero(elsewhere)[0])
            detail = f"mapa to rank {int(ranks[thread])} of a cluster of {wave.clusters.size} thread blocks"
            wave.fault_thread("out-of-bounds", detail, thread)
        put(wave, wave.clusters.address(np.broadcast_to(get(wave), (wave.threads,)), ranks))

    return execute


@instruction("getctarank")
def getctarank(syntax: Instruction, bind: Binder) -> Execute:
    """The rank of the block whose shared memory an address is in."""
    put = bind.destination(syntax.operands[0], TYPES["u32"])
    (get,) = bind.sources(syntax.operands[1:], data_type(syntax))
    return lambda wave: put(wave, wave.clusters.ranks(get(wave)).astype(np.uint32))


@instruction("isspacep")
def isspacep(syntax: Instruction, bind: Binder) -> Execute:
    space, _, part = syntax.modifiers[0].partition("::")
    if space not in WINDOW_BASE:
        raise Unsupported(f"state space {space}")
    put = bind.destination(syntax.operands[0], TYPES["pred"])
    (get,) = bind.sources(syntax.operands[1:], TYPES["u64"])
    windows = np.array(list(SPACE_OF_WINDOW), np.uint64)

    def execute(wave: Wave) -> None:
        addresses = get(wave)
        window = addresses >> np.uint64(WINDOW_BITS)
        if space == "global":
            put(wave, ~np.isin(window, windows))
            return
        found = window == np.uint64(WINDOW_BASE[space] >> WINDOW_BITS)
        if space == "shared" and part != "cluster":
            found &= wave.clusters.ranks(addresses) == wave.clusters.rank_of_thread
        put(wave, found)

    return execute


@instruction("createpolicy")
def createpolicy(syntax: Instruction, bind: Binder) -> Execute:
    """Cache policies have no effect without caches."""
    put = bind.destination(syntax.operands[0], TYPES["b64"])
    return lambda wave: put(wave, np.zeros(wave.threads, np.uint64))
