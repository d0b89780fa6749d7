"""Exchange between lanes of a warp: shfl, vote, match, redux, activemask, elect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder, data_type
from ..ptx.syntax import Instruction, Pair, Sink
from ..ptx.types import TYPES
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

_U32 = np.dtype(np.uint32)
_LANE_BITS = np.uint32(1) << np.arange(WARP_SIZE, dtype=np.uint32)
# What a lane reads from a lane that does not take part: undefined by PTX, here a NaN easy to recognise.
_UNDEFINED = np.uint32(0x7FFFDEAD)


def _by_warp(values: Any) -> Any:
    return values.reshape(-1, WARP_SIZE)


def _ballot(mask: np.ndarray) -> np.ndarray:
    """Per warp, the bits of the lanes where ``mask`` holds."""
    return np.where(_by_warp(mask), _LANE_BITS, np.uint32(0)).sum(axis=1, dtype=_U32)


def _spread(per_warp: np.ndarray) -> np.ndarray:
    return np.repeat(per_warp, WARP_SIZE)


def _full(wave: Wave, values: Any) -> Any:
    return np.full(wave.threads, values) if values.ndim == 0 else values


@instruction("shfl")
def shfl(syntax: Instruction, bind: Binder) -> Operation:
    mode = next(m for m in syntax.modifiers if m in ("up", "down", "bfly", "idx"))
    if not syntax.has("sync"):
        raise Unsupported("shfl without .sync")
    u32, pred = TYPES["b32"], TYPES["pred"]
    target = syntax.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    put, put_valid = bind.destination(first, u32), bind.destination(second, pred)
    get_value, get_b, get_c, get_members = (bind.source(operand, u32) for operand in syntax.operands[1:5])

    def execute(wave: Wave) -> None:
        value = _full(wave, get_value(wave))
        lane = wave.lane
        b = get_b(wave).astype(np.int64) & 31
        c = get_c(wave).astype(np.int64)
        segment = (c >> 8) & 31
        limit = (lane & segment) | (c & 31 & ~segment)
        if mode == "up":
            source = lane - b
            valid = source >= limit
        else:
            if mode == "down":
                source = lane + b
            elif mode == "bfly":
                source = lane ^ b
            else:
                source = (lane & segment) | (b & ~segment)
            valid = source <= limit
        source = np.where(valid, source, lane)
        index = _by_thread(wave) + source
        result = value[index]
        if wave.mask is not None:
            result = np.where(wave.mask[index], result, _UNDEFINED)
        put(wave, result)
        put_valid(wave, np.broadcast_to(valid, (wave.threads,)))

    return warp_synchronous(execute, get_members, aligned=False)


def _by_thread(wave: Wave) -> np.ndarray:
    """The index of lane 0 of every thread's warp."""
    return np.arange(wave.threads) - wave.lane


@instruction("vote")
def vote(syntax: Instruction, bind: Binder) -> Operation:
    mode = next(m for m in syntax.modifiers if m in ("all", "any", "uni", "ballot"))
    if not syntax.has("sync"):
        raise Unsupported("vote without .sync")
    put = bind.destination(syntax.operands[0], TYPES["b32" if mode == "ballot" else "pred"])
    get = bind.predicate(syntax.operands[1])
    get_members = bind.source(syntax.operands[2], TYPES["b32"])

    def execute(wave: Wave) -> None:
        predicate = np.broadcast_to(get(wave), (wave.threads,))
        members = get_members(wave)
        true = _spread(_ballot(predicate & wave.active_mask)) & members
        everyone = _spread(_ballot(wave.active_mask)) & members
        results = {
            "ballot": true,
            "any": true != 0,
            "all": true == everyone,
            "uni": (true == everyone) | (true == 0),
        }
        put(wave, results[mode])

    return warp_synchronous(execute, get_members, aligned=False)


@instruction("match")
def match(syntax: Instruction, bind: Binder) -> Operation:
    """any: the lanes with my value; all: every lane if all have it, else none."""
    needs_all = syntax.has("all")
    ptx_type = TYPES[next(m for m in reversed(syntax.modifiers) if m in TYPES)]
    target = syntax.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    put, put_same = bind.destination(first, TYPES["b32"]), bind.destination(second, TYPES["pred"])
    get = bind.source(syntax.operands[1], ptx_type)
    get_members = bind.source(syntax.operands[2], TYPES["b32"])

    def execute(wave: Wave) -> None:
        values = _by_warp(_full(wave, get(wave)))
        same = values[:, :, None] == values[:, None, :]
        everyone = _spread(_ballot(wave.active_mask)) & get_members(wave)
        lanes = np.where(same, _LANE_BITS, np.uint32(0)).sum(axis=2, dtype=_U32).ravel() & everyone
        if not needs_all:
            put(wave, lanes)
            return
        put(wave, np.where(lanes == everyone, everyone, np.uint32(0)))
        put_same(wave, lanes == everyone)

    return warp_synchronous(execute, get_members, aligned=False)


@instruction("redux")
def redux(syntax: Instruction, bind: Binder) -> Operation:
    ptx_type = data_type(syntax)
    if ptx_type.is_float:
        return _float_redux(syntax, bind)
    limits = np.iinfo(ptx_type.dtype)
    table: dict[str, tuple[Any, int]] = {
        "add": (np.add, 0),
        "min": (np.minimum, limits.max),
        "max": (np.maximum, limits.min),
        "and": (np.bitwise_and, -1),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }
    operation, neutral = table[next(m for m in syntax.modifiers if m in table)]
    identity = np.array(neutral).astype(ptx_type.dtype)
    put = bind.destination(syntax.operands[0], ptx_type)
    get = bind.source(syntax.operands[1], ptx_type)
    get_members = bind.source(syntax.operands[2], TYPES["b32"])

    def execute(wave: Wave) -> None:
        values = _by_warp(_full(wave, get(wave)))
        members = _spread(_ballot(wave.active_mask)) & get_members(wave)
        chosen = (_by_warp(members)[:, :, None] & _LANE_BITS) != 0  # [warp, lane, lane it adds up]
        put(
            wave, operation.reduce(np.where(chosen, values[:, None, :], identity), axis=2, dtype=ptx_type.dtype).ravel()
        )

    return warp_synchronous(execute, get_members, aligned=False)


def _float_redux(syntax: Instruction, bind: Binder) -> Operation:
    """min and max of f32, of magnitudes with .abs. NaN only counts with .NaN, or if there is nothing else."""
    f32 = TYPES["f32"]
    operation = {"min": np.fmin, "max": np.fmax}[syntax.modifiers[1]]
    of_magnitudes, propagates = syntax.has("abs"), syntax.has("NaN")
    put = bind.destination(syntax.operands[0], f32)
    get = bind.source(syntax.operands[1], f32)
    get_members = bind.source(syntax.operands[2], TYPES["b32"])

    def execute(wave: Wave) -> None:
        values = _by_warp(_full(wave, get(wave)))
        values = np.abs(values) if of_magnitudes else values
        members = _spread(_ballot(wave.active_mask)) & get_members(wave)
        chosen = (_by_warp(members)[:, :, None] & _LANE_BITS) != 0
        nan = np.float32(np.nan)
        result = operation.reduce(np.where(chosen, values[:, None, :], nan), axis=2)
        if propagates:
            result = np.where((chosen & np.isnan(values)[:, None, :]).any(axis=2), nan, result)
        put(wave, np.where(np.isnan(result), np.uint32(0x7FFFFFFF).view(np.float32), result).astype(np.float32).ravel())

    return warp_synchronous(execute, get_members, aligned=False)


@instruction("activemask")
def activemask(syntax: Instruction, bind: Binder) -> Execute:
    put = bind.destination(syntax.operands[0], TYPES["b32"])
    return lambda wave: put(wave, _spread(_ballot(wave.active_mask)))


@instruction("elect")
def elect(syntax: Instruction, bind: Binder) -> Operation:
    """One leader of the members: the lowest lane."""
    target = syntax.operands[0]
    assert isinstance(target, Pair)
    put, put_leader = (
        bind.destination(target.first, TYPES["b32"]),
        bind.destination(target.second, TYPES["pred"]),
    )
    get_members = bind.source(syntax.operands[1], TYPES["b32"])

    def execute(wave: Wave) -> None:
        members = (_spread(_ballot(wave.active_mask)) & get_members(wave)).astype(np.int64)
        leader = np.log2(np.maximum(members & -members, 1)).astype(np.int64)
        put(wave, leader.astype(_U32))
        put_leader(wave, wave.lane == leader)

    return warp_synchronous(execute, get_members, aligned=False)
