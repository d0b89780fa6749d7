"""Every Hopper knob reaches the generated code: the PTX of real kernels, as counts and as the order of instructions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest
from simulated_cases import ROUNDING

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
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.hopper.config import D_HEADS
from flashwright.kernels.forward.hopper.defaults import hopper_default
from flashwright.problem.lengths import LONG
from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.problem.variant import PLAIN
from flashwright.runtime.simulated import simulate_forward
from flashwright.simulator.ptx.parser import parse
from flashwright.simulator.ptx.syntax import Immediate, Instruction
from flashwright.workbench.explain.gather import SERIALISED
from flashwright.workbench.tuning.space import space_of

BASE = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy")
KNOBS = {
    "in sequence": {"overlaps_softmax": False},
    "one stage": {"overlaps_softmax": False, "kv_stages": 1},
    "three stages": {"kv_stages": 3},
    "no turns": {"ping_pong": False},
    "eager rescaling": {"lazy_rescale": False},
    "guesses": {"guesses_maxima": True},
    "three consumers": {"B_r": 192},
    "one consumer": {"B_r": 64, "ping_pong": False},
    "two panels, BF16": {"d_head": 96, "dtype": DType.BF16},
}
CONFIGS = {"base": BASE} | {name: replace(BASE, **changes) for name, changes in KNOBS.items()}
GUESSING = CONFIGS["guesses"]
CAUSAL = AttentionVariant(masks_right=True)
PACKED = AttentionVariant(variable_lengths=True)


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
        "bar.red": "any?",
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
    """Sixteen summed over at a time; the first step and the loop each have both products once. Where a guess may
    fail, the loop has the scores twice."""
    element = {DType.FP16: "f16", DType.BF16: "bf16"}[config.dtype]
    product = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{element}.{element}"
    scores = 3 if config.guesses_maxima else 2
    assert count(config, product.format(config.B_c)) == scores * config.d_head // 16
    assert count(config, product.format(config.d_head)) == 2 * config.B_c // 16
    assert count(config, "wgmma.mma_async") == (scores * config.d_head + 2 * config.B_c) // 16
    assert count(config, "wgmma.fence") == count(config, "wgmma.commit_group") == scores + 2


def test_the_first_product_of_the_scores_does_not_read_what_was_there(config):
    """Of each run of products the first has a predicate that is false, and does not add; all others add."""
    products = found(config, f"wgmma.mma_async.sync.aligned.m64n{config.B_c}k16")
    runs = [products[i : i + config.d_head // 16] for i in range(0, len(products), config.d_head // 16)]
    false = {item.operands[0] for item in found(config, "setp.ne.b32") if item.operands[1] == item.operands[2]}
    for first, *others in runs:
        assert first.operands[3] in false
        assert {int(item.operands[3].value) for item in others} == {1}


def test_everything_is_copied_by_the_copy_engine_in_panels(config):
    """Q once for each consumer, K and V before and in the loop; nothing of them passes through registers."""
    fills = config.n_consumers + 2 + 2
    assert count(config, "mbarrier.arrive.expect_tx") == fills
    copies = found(config, "cp.async.bulk")
    assert len(copies) == fills * HopperTileShapes(config).panels
    assert {item.opcode for item in copies} == {
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    }
    assert count(config, "ldmatrix", "ld.global", "cp.async.c", "fence.proxy") == 0


def test_what_comes_next_is_announced_in_one_store_and_heard_in_one_load(config):
    """Announced: a tile, and that there are no more. The producer and the consumers hear of the first tile and of each
    further one; whoever hears reads all of it at once."""
    assert [item.opcode for item in found(config, "st.shared")] == 2 * ["st.shared.v4.b32"]
    assert [item.opcode for item in found(config, "ld.shared")] == 2 * 2 * ["ld.shared.v4.b32"]


def test_two_barriers_guard_each_tile_in_shared_memory(config):
    """Q has two slots for each of up to two consumers, and two tiles are announced."""
    Q_slots = config.n_consumers * (1 if config.n_consumers == 3 else 2)
    assert count(config, "mbarrier.init") == 2 * (Q_slots + 2 * config.kv_stages + 2)
    # The scheduler waits before each announcement, the producer for each and before each fill; a consumer for each, for
    # Q, twice for V, and for K twice, or once more after a guess that failed. One that skips a step waits for K and V.
    waits = 2 + (2 + config.n_consumers + 4) + (2 + 1 + 2 + 2 + config.guesses_maxima) + 2
    assert count(config, "mbarrier.try_wait") == waits
    # Whoever waited for a tile, K, V or Q releases it; the scheduler arrives after each announcement. Q's release is in
    # the code three times, as a skipped step or the first may be the last.
    assert count(config, "mbarrier.arrive.shared") == 2 + 2 + (2 + 2 + 2 + 2) + 3


def test_a_block_that_stays_has_two_slots_of_Q_for_each_consumer():
    def barriers(persistent: bool) -> int:
        return count(replace(BASE, persistent=persistent), "mbarrier.init")

    assert barriers(persistent=True) == barriers(persistent=False) + 2 * BASE.n_consumers


def test_the_producer_gives_registers_to_the_consumers(config):
    shapes = HopperTileShapes(config)
    (given,), (taken,) = (found(config, f"setmaxnreg.{way}.sync.aligned") for way in ("dec", "inc"))
    assert (number(given), number(taken)) == (shapes.producer_registers, shapes.consumer_registers)
    assert {1: (24, 240), 2: (24, 240), 3: (32, 160)}[config.n_consumers] == (number(given), number(taken))


def test_turns_are_taken_at_named_barriers(config):
    """Beside the barrier of all threads at the start: a wait and a pass in a skipped step, in the first step and in the
    loop, and the first pass."""
    assert count(config, "bar.sync", "barrier.sync") == 1 + (3 if config.ping_pong else 0)
    assert count(config, "bar.arrive", "barrier.arrive") == (4 if config.ping_pong else 0)


def test_a_guess_is_voted_on_by_the_warpgroup(config):
    assert count(config, "bar.red.or.pred", "barrier.red") == config.guesses_maxima
    if config.guesses_maxima:
        (vote,) = found(config, "bar.red.or.pred")
        threads = vote.operands[2]
        (moved,) = (item for item in found(config, "mov") if item.operands[0] == threads)
        assert number(moved) == 128


def test_only_steps_without_a_mask_guess():
    """Of a causal kernel the steps along the diagonal, of a window those at both edges, search for maxima."""
    for variant, masked_loops in ((CAUSAL, 1), (AttentionVariant(masks_left=True, masks_right=True), 2)):
        assert count(GUESSING, "bar.red", variant=variant) == 1
        # A step that searches for maxima shuffles two rows' twice; the first one is there for half a block as well.
        assert count(GUESSING, "shfl", variant=variant) - count(GUESSING, "shfl") == 4 * (masked_loops + 1)


def test_a_guess_adds_no_maxima_to_the_code():
    """They are found where it fails, and nowhere else in the loop."""
    assert count(GUESSING, "max.f32") == count(BASE, "max.f32")
    assert count(GUESSING, "shfl") == count(BASE, "shfl")


def test_lazy_rescaling_votes_on_whether_any_lane_needs_it(config):
    """But for kernels that guess: their few steps that search for maxima always rescale."""
    assert count(config, "vote.sync.any") == (config.lazy_rescale and not config.guesses_maxima)


def test_softmax_runs_during_the_product_before_it_only_if_it_overlaps():
    S, O, first, further = ("S", 4), ("O", 2), ("exp2", 16), ("exp2", 16 + 2)  # noqa: E741
    store, skipped = ("store", 4), ("wait 0", 1)
    assert events(BASE) == [
        skipped, S, ("wait 0", 1), first,
        S, O, ("wait 1", 1), further, ("wait 0", 1),
        O, ("wait 0", 1), store,
    ]  # fmt: skip
    assert events(CONFIGS["in sequence"]) == [
        skipped, S, ("wait 0", 1), first, O, ("wait 0", 1),
        S, ("wait 0", 1), further, O, ("wait 0", 1), store,
    ]  # fmt: skip
    guessed, failed = [("exp2", 16), ("any?", 1)], [("wait 0", 1), S, ("wait 0", 1), further]
    assert events(GUESSING) == [
        skipped, S, ("wait 0", 1), first,
        S, O, ("wait 1", 1), *guessed, *failed, ("wait 0", 1),
        O, ("wait 0", 1), store,
    ]  # fmt: skip


def test_a_guess_searches_for_no_maximum_before_the_vote():
    """Nor do lanes exchange anything."""
    opcodes = [item.opcode for item in instructions(GUESSING)]
    vote = opcodes.index("bar.red.or.pred")
    scores = max(i for i, item in enumerate(instructions(GUESSING)[:vote]) if item.opcode.startswith("wgmma.wait"))
    guessed = opcodes[scores:vote]
    assert sum(opcode.startswith("ex2") for opcode in guessed) == 16
    assert not any(opcode.startswith(("max", "shfl", "vote")) for opcode in guessed)


def test_a_persistent_block_differs_in_its_order_of_tiles_where_they_differ_in_length():
    """With three consumers, which have one slot of Q each in any case."""

    def code(persistent: bool, variant: AttentionVariant) -> list[str]:
        config = replace(CONFIGS["three consumers"], persistent=persistent)
        return [item.opcode for item in instructions(config, variant)]

    assert code(True, PLAIN) == code(False, PLAIN)
    assert code(True, CAUSAL) != code(False, CAUSAL)


def test_a_mask_is_in_the_code_of_the_steps_that_need_one():
    """One more loop, of the steps along the diagonal; step 0 is masked as well, the other loop is not."""
    scores, halves, outputs = BASE.d_head // 16, BASE.d_head // 16, BASE.B_c // 16
    assert count(BASE, "wgmma.mma_async", variant=CAUSAL) == 3 * scores + halves + 3 * outputs
    assert count(BASE, "ex2", variant=CAUSAL) == 16 + 8 + 2 * (16 + 2)


def test_half_a_block_is_computed_along_the_diagonal_only():
    """In the first step of kernels that overlap; 32 keys are two steps of the product with V, half of them is one."""
    half = "wgmma.mma_async.sync.aligned.m64n16k16"
    assert count(BASE, half) == 0
    assert count(BASE, half, variant=CAUSAL) == count(GUESSING, half, variant=CAUSAL) == BASE.d_head // 16
    assert count(CONFIGS["in sequence"], half, variant=CAUSAL) == 0
    assert count(BASE, half, variant=AttentionVariant(masks_left=True)) == 0


def test_only_packed_sequences_clear_rows_of_V():
    """By ordinary stores: a proxy fence and a barrier of all consumers follow before the products read them."""
    assert count(BASE, "st.shared.v4", variant=PACKED) > count(BASE, "st.shared.v4") == 2
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
    """The consumers spill nothing; the producer and the scheduler, with their few registers, a word or a few."""
    config = get_hopper_progression_configs("BF16", d_head)[-1]
    kernel = compile_kernel(config)
    assert kernel.spill_bytes <= 16
    assert kernel.registers * kernel.threads <= 64 * 1024
    assert occupancy(kernel, "sm_90a").blocks_per_sm == 1
    assert kernel.arch == "sm_90a"


def test_the_family_is_refused_on_other_architectures():
    with pytest.raises(ValueError, match="arch: the hopper family runs on sm_90a alone, not on sm_80"):
        compile_kernel(BASE, "sm_80")


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("variant", [PLAIN, CAUSAL], ids=["full", "causal"])
def test_products_run_while_others_are_issued(d_head, variant):
    """The assembler lets them wait for each other when it finds no registers for them all, and says so."""
    occasion = Occasion(DType.BF16, d_head, variant is CAUSAL, LONG, LONG, GPUModel.of_architecture("H200", "sm_90"))
    kernel = compile_kernel(hopper_default(occasion), variant=variant)
    assert SERIALISED not in kernel.program.log


@pytest.mark.slow
@pytest.mark.parametrize("config", get_hopper_configs("BF16"), ids=str)
@pytest.mark.parametrize("variant", [PLAIN, CAUSAL], ids=["full", "causal"])
def test_every_kernel_of_the_space_spills_no_more_than_is_timed_and_serialises_nothing(config, variant):
    kernel = compile_kernel(config, variant=variant)
    assert kernel.spill_bytes <= space_of("hopper").bearable_spill_bytes
    assert SERIALISED not in kernel.program.log
