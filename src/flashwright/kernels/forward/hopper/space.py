"""Which Hopper configs are worth timing: every combination of the knobs, less what the rules remove."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from flashwright.kernels.family import SearchSpace
from flashwright.kernels.forward.hopper.config import D_HEADS, HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.shapes import HopperTileShapes
from flashwright.problem.dtypes import DType

RULES = ("shared memory", "registers", "consumers", "overlap", "lazy", "guess", "step", "stages", "grid", "order")
"""The first that a config breaks rejects it."""

_B_R = (64, 128, 192)
_B_C = tuple(range(64, 193, 16))
_STAGES = (1, 2, 3, 4)
_OTHER_REGISTERS = 32
"""Registers of a consumer thread beside its operands: row maxima and sums, addresses, descriptors, the loop. With fewer
left, the compiler spills or serialises the products."""
_OTHER_REGISTERS_OF_TWO_CHAINS = 40
"""The same where the softmax keeps two independent chains of maxima."""
_SMALLEST_STEP = 6 * 1024
"""Elements of a K block. Smaller steps do not amortise their fixed cost: barriers, turns, maxima across lanes."""
_WIDEST_BOUND_BY_SOFTMAX = 128
"""d_head up to which the search for maxima costs time; for wider heads the products hide it."""
_BYTES_AHEAD = 64 * 1024
"""K and V in flight to one multiprocessor: twice what an H200's memory delivers to it (4.8 TB/s over 132) within a
latency of about 1 µs."""


def hopper_rejection_reason(config: HopperForwardKernelConfig) -> str | None:
    """Why a config is not worth timing: "rule: reason" with its numbers; None if it is kept."""
    try:
        shapes = HopperTileShapes(config)
    except ValueError as error:
        return f"shared memory: {error}"
    return _does_not_pay(config, shapes) or _is_redundant(config, shapes)


def _does_not_pay(config: HopperForwardKernelConfig, shapes: HopperTileShapes) -> str | None:
    others = _OTHER_REGISTERS_OF_TWO_CHAINS if shapes.spreads_chains else _OTHER_REGISTERS
    if shapes.consumer_registers - shapes.operand_registers < others:
        return (
            f"registers: O, S and P take {shapes.O_registers} + {shapes.S_registers} + {shapes.P_registers} of the "
            f"{shapes.consumer_registers} registers that a thread has with B_r = {config.B_r}; {others} must remain"
        )
    if config.n_consumers == 1:
        return f"consumers: B_r = {config.B_r} is one warpgroup; while it computes its softmax, nobody issues products"
    if not config.overlaps_softmax:
        return f"overlap: off; a warpgroup's products wait for its softmax (kv_stages = {config.kv_stages})"
    if not config.lazy_rescale:
        return f"lazy: off; every step multiplies O's {shapes.O_registers} registers, nearly always by one"
    if not config.guesses_maxima and config.d_head <= _WIDEST_BOUND_BY_SOFTMAX:
        return f"guess: off; every step compares {shapes.S_registers} scores a thread, nearly always for nothing"
    if config.B_c * config.d_head < _SMALLEST_STEP:
        return (
            f"step: {config.B_c} keys of {config.d_head} columns are {config.B_c * config.d_head} elements, fewer than "
            f"the {_SMALLEST_STEP} that make up for the barriers of a step"
        )
    return None


def _is_redundant(config: HopperForwardKernelConfig, shapes: HopperTileShapes) -> str | None:
    """Why a config that may be good need not be timed: others stand for it."""
    ahead = 2 * shapes.KV_bytes * (config.kv_stages - 1)
    if config.kv_stages > 2 and ahead > _BYTES_AHEAD:
        return (
            f"stages: {config.kv_stages - 1} of the {config.kv_stages} stages hold {ahead // 1024} KiB of K and V; "
            f"{_BYTES_AHEAD // 1024} KiB on the way hide the latency of memory"
        )
    if not config.persistent and (config.kv_stages > 2 or not config.ping_pong):
        return (
            "grid: thread blocks of one tile each are tried with ping_pong and two stages; "
            f"ping_pong = {config.ping_pong} with {config.kv_stages} stages is tried with persistent ones"
        )
    if config.first_block_leads and not (config.persistent and config.kv_stages == 2):
        return (
            "order: first_block_leads is tried with persistent thread blocks and two stages; "
            f"persistent = {config.persistent} with {config.kv_stages} stages is tried without"
        )
    return None


def hopper_search_space(dtype: DType, d_head: int) -> Iterator[tuple[HopperForwardKernelConfig, str | None]]:
    """Every combination of the knobs' values that is a config, with why it is not worth timing, or None if it is."""
    flags = (False, True)
    for B_r, B_c, stages, overlap, ping_pong, persistent, lazy, guess, first_leads in product(
        _B_R, _B_C, _STAGES, flags, flags, flags, flags, flags, flags
    ):
        if (overlap and stages == 1) or (ping_pong and B_r == _B_R[0]) or (guess and not (overlap and lazy)):
            continue  # not a config
        if first_leads and not guess:
            continue  # nor is this
        config = HopperForwardKernelConfig(
            dtype, d_head, B_r, B_c, stages,
            overlaps_softmax=overlap, ping_pong=ping_pong, persistent=persistent, lazy_rescale=lazy,
            guesses_maxima=guess, first_block_leads=first_leads,
        )  # fmt: skip
        yield config, hopper_rejection_reason(config)


def get_hopper_configs(dtype: DType | str | None = None, d_head: int | None = None) -> list[HopperForwardKernelConfig]:
    """The search space: every config worth timing, of one or all dtypes and head dimensions."""
    dtypes = tuple(DType) if dtype is None else (DType.parse(dtype),)
    d_heads = D_HEADS if d_head is None else (d_head,)
    return [config for some in product(dtypes, d_heads) for config in _worth_timing(*some)]


@cache
def _worth_timing(dtype: DType, d_head: int) -> tuple[HopperForwardKernelConfig, ...]:
    return tuple(config for config, reason in hopper_search_space(dtype, d_head) if reason is None)


def is_promising(config: HopperForwardKernelConfig) -> bool:
    """Whether a config has what the fastest had on an H200: two stages, persistent thread blocks, and steps that keep
    the tensor cores busy and fit the registers (S needs most of them at d_head 64, O for wider heads)."""
    least, most = (6, 8) if config.d_head == 64 else (10, 20)
    step_elements = config.B_c * config.d_head
    return config.persistent and config.kv_stages == 2 and least * 1024 <= step_elements <= most * 1024


# The largest tiles that fit leave a thread few registers, and the compiler spills some values around the loops, once a
# tile. That may still be faster than smaller tiles: timing decides.
SPACE = SearchSpace(hopper_search_space, is_promising, RULES, bearable_spill_bytes=72)
