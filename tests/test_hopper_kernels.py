"""Every Hopper knob reaches the generated code: the PTX of real kernels, as counts and as the order of instructions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest

from flashwright import (
    AttentionVariant,
    DType,
    HopperForwardKernelConfig,
    HopperTileShapes,
    Kernel,
    compile_kernel,
    get_hopper_configs,
    get_hopper_progression_configs,
    occupancy,
    parse_hopper_config,
)
from flashwright.hopper.config import D_HEADS
from flashwright.simulation import random_inputs, reference_forward, relative_error, simulate_forward
from flashwright.simulator.ptx.parser import parse
from flashwright.simulator.ptx.syntax import Immediate, Instruction
from flashwright.tuning.space import SPACES
from flashwright.variant import PLAIN
from simulated_cases import ROUNDING

BASE = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy")
KNOBS = {
    "in sequence": {"overlaps_softmax": False},
    "one stage": {"overlaps_softmax": False, "kv_stages": 1},
    "three stages": {"kv_stages": 3},
    "no turns": {"ping_pong": False},
    "eager rescaling": {"lazy_rescale": False},
    "three consumers": {"B_r": 192},
    "one consumer": {"B_r": 64, "ping_pong": False},
    "two panels, BF16": {"d_head": 96, "dtype": DType.BF16},
}
CONFIGS = {"base": BASE} | {name: replace(BASE, **changes) for name, changes in KNOBS.items()}
CAUSAL = AttentionVariant(masks_right=True)
PACKED = AttentionVariant(variable_lengths=True, ragged_q=True, ragged_kv=True)


@pytest.fixture(params=CONFIGS.values(), ids=list(CONFIGS))
def config(request) -> HopperForwardKernelConfig:
    return request.param


# --- Reading PTX -------------------------------------------------------------------------------------------------


@cache
def compiled(config: HopperForwardKernelConfig, variant: AttentionVariant = PLAIN) -> Kernel:
    return compile_kernel(config, variant=variant)


@cache
def instructions(config: HopperForwardKernelConfig, variant: AttentionVariant = PLAIN) -> tuple[Instruction, ...]:
    (function,) = (f for f in parse(compiled(config, variant).ptx).functions.values() if f.is_entry)
    return tuple(item for item in function.body if isinstance(item, Instruction))


def found(config: HopperForwardKernelConfig, *prefixes: str, variant: AttentionVariant = PLAIN) -> list[Instruction]:
    return [item for item in instructions(config, variant) if item.opcode.startswith(prefixes)]


def count(config: HopperForwardKernelConfig, *prefixes: str, variant: AttentionVariant = PLAIN) -> int:
    return len(found(config, *prefixes, variant=variant))


def number(item: Instruction) -> int:
    """The immediate operand of an instruction that has one."""
    (operand,) = (operand for operand in item.operands if isinstance(operand, Immediate))
    return int(operand.value)


def events(config: HopperForwardKernelConfig) -> list[tuple[str, int]]:
    """What a consumer does, as (event, how many in a row)."""
    names = {
        f"wgmma.mma_async.sync.aligned.m64n{config.B_c}k16": "S",
        f"wgmma.mma_async.sync.aligned.m64n{config.d_head}k16": "O",
        "ex2": "exp2",
        "st.global": "store",
    }
    seen = []
    for item in instructions(config):
        if item.opcode.startswith("wgmma.wait_group"):
            seen.append(f"wait {number(item)}")
        else:
            seen += [name for opcode, name in names.items() if item.opcode.startswith(opcode)]
    return [(event, len(list(run))) for event, run in groupby(seen)]


# --- What each knob does -----------------------------------------------------------------------------------------


def test_the_products_are_those_of_the_tile(config):
    """Sixteen summed over at a time; the first step and the loop each have both products once."""
    element = {DType.FP16: "f16", DType.BF16: "bf16"}[config.dtype]
    product = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{element}.{element}"
    assert count(config, product.format(config.B_c)) == 2 * config.d_head // 16
    assert count(config, product.format(config.d_head)) == 2 * config.B_c // 16
    assert count(config, "wgmma.mma_async") == 2 * (config.d_head + config.B_c) // 16
    assert count(config, "wgmma.fence") == count(config, "wgmma.commit_group") == 4


def test_everything_is_copied_by_the_copy_engine_in_panels(config):
    """Q once for each consumer, K and V before and in the loop; nothing passes through registers to shared memory."""
    fills = config.n_consumers + 2 + 2
    assert count(config, "mbarrier.arrive.expect_tx") == fills
    copies = found(config, "cp.async.bulk")
    assert len(copies) == fills * HopperTileShapes(config).panels
    assert {item.opcode for item in copies} == {
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    }
    assert count(config, "st.shared", "ld.shared", "ldmatrix", "ld.global", "cp.async.c", "fence.proxy") == 0


def test_two_barriers_guard_each_tile_in_shared_memory(config):
    assert count(config, "mbarrier.init") == 2 * (config.n_consumers + 2 * config.kv_stages)
    # The producer waits before each fill; a consumer for Q, twice for K and twice for V.
    assert count(config, "mbarrier.try_wait") == config.n_consumers + 4 + 5


def test_the_producer_gives_registers_to_the_consumers(config):
    shapes = HopperTileShapes(config)
    (given,), (taken,) = (found(config, f"setmaxnreg.{way}.sync.aligned") for way in ("dec", "inc"))
    assert (number(given), number(taken)) == (shapes.producer_registers, shapes.consumer_registers)
    assert {1: (24, 240), 2: (24, 240), 3: (32, 160)}[config.n_consumers] == (number(given), number(taken))


def test_turns_are_taken_at_named_barriers(config):
    """Beside the barrier of all threads at the start: a wait and a pass before and in the loop, and the first pass."""
    assert count(config, "bar.sync", "barrier.sync") == 1 + (2 if config.ping_pong else 0)
    assert count(config, "bar.arrive", "barrier.arrive") == (3 if config.ping_pong else 0)


def test_lazy_rescaling_asks_whether_any_lane_needs_it(config):
    assert count(config, "vote.sync.any") == config.lazy_rescale


def test_softmax_runs_during_the_product_before_it_only_if_it_overlaps():
    S, O, first, further = ("S", 4), ("O", 2), ("exp2", 16), ("exp2", 16 + 2)  # noqa: E741
    store = ("store", 4)
    assert events(BASE) == [
        S, ("wait 0", 1), first,
        S, O, ("wait 1", 1), further, ("wait 0", 1),
        O, ("wait 0", 1), store,
    ]  # fmt: skip
    assert events(CONFIGS["in sequence"]) == [
        S, ("wait 0", 1), first, O, ("wait 0", 1),
        S, ("wait 0", 1), further, O, ("wait 0", 1), store,
    ]  # fmt: skip


def test_a_persistent_block_differs_in_its_order_of_tiles_where_they_differ_in_length():
    def code(persistent: bool, variant: AttentionVariant) -> list[str]:
        return [item.opcode for item in instructions(replace(BASE, persistent=persistent), variant)]

    assert code(True, PLAIN) == code(False, PLAIN)
    assert code(True, CAUSAL) != code(False, CAUSAL)


def test_a_mask_is_in_the_code_of_the_steps_that_need_one():
    """One more loop, of the steps along the diagonal; step 0 is masked as well, the other loop is not."""
    assert count(BASE, "wgmma.mma_async", variant=CAUSAL) == 3 * (BASE.d_head + BASE.B_c) // 16
    assert count(BASE, "ex2", variant=CAUSAL) == 16 + 2 * (16 + 2)


def test_only_packed_sequences_clear_rows_of_V():
    """By ordinary stores: a proxy fence and a barrier of all consumers follow before the products read them."""
    assert count(BASE, "st.shared.v4", variant=PACKED) > 0
    assert count(BASE, "fence.proxy.async", variant=PACKED) > count(BASE, "fence.proxy.async") == 0
    assert count(BASE, "bar.sync", "barrier.sync", variant=PACKED) > count(BASE, "bar.sync", "barrier.sync")


def test_the_kernel_computes_attention(config):
    """Tiles of which some thread blocks have several; and hazards are checked."""
    inputs = random_inputs(config, heads=1, rows=384)
    output = simulate_forward(config, *inputs).output
    assert relative_error(output, reference_forward(*inputs)[0]) < ROUNDING[config.dtype]


# --- What the compiler makes of it -------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", D_HEADS)
def test_the_top_of_the_ladder_fills_a_multiprocessor_without_spills_to_speak_of(d_head):
    config = get_hopper_progression_configs("BF16", d_head)[-1]
    kernel = compile_kernel(config)
    # Three consumers leave each thread so few registers that some values live in memory.
    assert kernel.spill_bytes <= (SPACES["hopper"].bearable_spill_bytes if config.n_consumers == 3 else 0)
    assert kernel.registers * kernel.threads <= 64 * 1024
    assert occupancy(kernel, "sm_90a").blocks_per_sm == 1
    assert kernel.arch == "sm_90a"


def test_the_family_is_refused_on_other_architectures():
    with pytest.raises(ValueError, match="arch: the hopper family runs on sm_90a alone, not on sm_80"):
        compile_kernel(BASE, "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("config", get_hopper_configs("BF16"), ids=str)
def test_every_kernel_of_the_space_spills_no_more_than_is_timed(config):
    assert compile_kernel(config).spill_bytes <= SPACES["hopper"].bearable_spill_bytes
