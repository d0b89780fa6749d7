"""Every Hopper knob reaches the generated code: the PTX of real kernels, as counts and as the order of instructions."""

from __future__ import annotations

import math
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
from flashwright.workbench.explain.disassembly import NOT_FOUND, disassemble, find_disassembler
from flashwright.workbench.explain.gather import SERIALISED
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_sass
from flashwright.workbench.explain.loop import KV_LOOP, ptx_loop, sass_loop
from flashwright.workbench.tuning.space import space_of

BASE = parse_hopper_config("hopper (FP16, 64, 128, 32): stages_2+overlap+ping_pong+persistent+lazy")
KNOBS = {
    "in sequence": {"overlaps_softmax": False},
    "one stage": {"overlaps_softmax": False, "kv_stages": 1},
    "three stages": {"kv_stages": 3},
    "no turns": {"ping_pong": False},
    "eager rescaling": {"lazy_rescale": False},
    "guesses": {"guesses_maxima": True},
    "guesses, first block first": {"guesses_maxima": True, "first_block_leads": True},
    "three consumers": {"B_r": 192},
    "one consumer": {"B_r": 64, "ping_pong": False},
    "two panels, BF16": {"d_head": 96, "dtype": DType.BF16},
}
CONFIGS = {"base": BASE} | {name: replace(BASE, **changes) for name, changes in KNOBS.items()}
GUESSING = CONFIGS["guesses"]
CAUSAL = AttentionVariant(masks_right=True)
WINDOW = AttentionVariant(masks_left=True, masks_right=True)
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


def loops(config: HopperForwardKernelConfig) -> int:
    """Of KV steps after the first, without a mask: with care and without, where maxima are guessed."""
    return 2 if config.guesses_maxima else 1


def kv_loop(config: HopperForwardKernelConfig, variant: AttentionVariant, guesses: bool) -> list[Instruction]:
    """The loop of steps that guess, or the smaller one of those that do not."""
    kernel = compiled(config, variant)
    loop = ptx_loop(kernel.ptx, kernel.name, [*KV_LOOP, Kind.VOTE] if guesses else KV_LOOP)
    lines = {line.line for line in loop.body}
    return [item for item in instructions(config, variant) if item.ptx_line in lines]


def is_mask(item: Instruction) -> bool:
    """Whether it is a choice of a score or minus infinity."""
    values = (operand.value for operand in item.operands if isinstance(operand, Immediate))
    return item.opcode == "selp.f32" and -math.inf in values


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
    """Sixteen summed over at a time; the first step and each loop have both products once. Where exponentials may
    overflow, a loop has the scores twice."""
    element = {DType.FP16: "f16", DType.BF16: "bf16"}[config.dtype]
    product = "wgmma.mma_async.sync.aligned.m64n{}k16.f32." + f"{element}.{element}"
    outputs = 1 + loops(config)
    scores = outputs + config.guesses_maxima
    assert count(config, product.format(config.B_c)) == scores * config.d_head // 16
    assert count(config, product.format(config.d_head)) == outputs * config.B_c // 16
    assert count(config, "wgmma.mma_async") == (scores * config.d_head + outputs * config.B_c) // 16
    assert count(config, "wgmma.fence") == count(config, "wgmma.commit_group") == scores + outputs


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
    # Q, for K and V in the first step and in each loop, and for K once more after exponentials that overflowed. One
    # that skips a step waits for K and V.
    steps = 1 + loops(config)
    waits = 2 + (2 + config.n_consumers + 4) + (2 + 1 + 2 * steps + config.guesses_maxima) + 2
    assert count(config, "mbarrier.try_wait") == waits
    # Whoever waited for a tile, K, V or Q releases it; the scheduler arrives after each announcement. K and V are
    # released in a skipped step, in the first and in each loop; so is Q, as each of these may have the last step.
    assert count(config, "mbarrier.arrive.shared") == 2 + (2 + 2) + (2 + 1) * (1 + steps)


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
    """Beside the barrier of all threads at the start: a wait and a pass in a skipped step, in the first step and in
    each loop, and the first pass."""
    turns = 2 + loops(config) if config.ping_pong else 0
    assert count(config, "bar.sync", "barrier.sync") == 1 + turns
    assert count(config, "bar.arrive", "barrier.arrive") == (turns + 1 if config.ping_pong else 0)


def test_a_guess_is_voted_on_by_the_warpgroup(config):
    assert count(config, "bar.red.or.pred", "barrier.red") == config.guesses_maxima
    if config.guesses_maxima:
        (vote,) = found(config, "bar.red.or.pred")
        threads = vote.operands[2]
        (moved,) = (item for item in found(config, "mov") if item.operands[0] == threads)
        assert number(moved) == 128


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_only_steps_without_a_mask_guess(variant):
    """Of two loops, one guesses and has no mask in its code, the other masks and does not guess: in all variants."""
    guessing, careful = (kv_loop(GUESSING, variant, guesses) for guesses in (True, False))
    for loop, votes, masked_scores in ((guessing, 1, 0), (careful, 0, 16)):
        assert sum(item.opcode.startswith("bar.red") for item in loop) == votes
        assert sum(is_mask(item) for item in loop) == masked_scores
    assert count(GUESSING, "bar.red", variant=variant) == 1
    full_blocks = f"wgmma.mma_async.sync.aligned.m64n{GUESSING.B_c}k16"
    assert count(GUESSING, full_blocks, variant=variant) == count(GUESSING, full_blocks)


def test_maxima_of_scores_are_in_the_code_of_the_first_step_of_care_and_of_overflows():
    """Of eight scores a row, in two chains, and over four lanes, in three places. Where sums have grown, in both loops,
    lanes exchange the largest; where a key dominates, too, in the three places with care. Behind the first step, a
    step's sum is compared with the larger of what the thread and its row had."""
    rows, of_chains, over_lanes = 2, 1, 2
    maxima, grown = 3 * rows * (8 + of_chains + over_lanes), 2 * rows * over_lanes
    dominant = 3 * rows * over_lanes + 3 * rows
    assert count(GUESSING, "max.f32") == maxima + grown + dominant


def test_warps_vote_on_what_any_of_their_lanes_needs(config):
    """Lazy rescaling, on whether O has to be rescaled. With care, on whether a key dominates some row, on whether a
    reference was raised, and on whether sums have grown: in its loop, and after an overflow; the first step, on the
    first of these. Without, on the barrier's answer, which is every lane's; on whether there is anything to do but add,
    and on whether that is because sums have grown."""
    votes = 1 + 2 * 3 + 1 + 2 if config.guesses_maxima else int(config.lazy_rescale)
    assert count(config, "vote.sync.any") == votes


def test_softmax_runs_during_the_product_before_it_only_if_it_overlaps():
    """Lazy rescaling takes two exponentials for each of a thread's rows to know whether a key dominates it, and one to
    rescale. Care takes two, to raise the reference and to round the largest; the first step of a guess takes one, to
    round the largest."""
    S, O, first, further = ("S", 4), ("O", 2), ("exp2", 16), ("exp2", 16 + 2 * 3)  # noqa: E741
    careful = ("exp2", 16 + 2 * 2)
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
    assert events(CONFIGS["eager rescaling"])[7] == ("exp2", 16 + 2)
    guessed, overflowed = [("exp2", 16), ("any?", 1)], [("wait 0", 1), S, ("wait 0", 1), careful]
    rescaled_or_not = ("wait 0", 2)
    assert events(GUESSING) == [
        skipped, S, ("wait 0", 1), ("exp2", 16 + 2),
        S, O, ("wait 1", 1), careful, rescaled_or_not,
        S, O, ("wait 1", 1), *guessed, *overflowed, rescaled_or_not,
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
    assert count(BASE, "ex2", variant=CAUSAL) == 16 + 8 + 2 * (16 + 2 * 3)


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
    """The producer and the scheduler, with their few registers, spill a word or a few. At d_head 256 O and S leave a
    consumer no registers for where its tile lies: it stores and loads that once a tile."""
    config = get_hopper_progression_configs("BF16", d_head)[-1]
    kernel = compile_kernel(config)
    assert kernel.spill_bytes <= (64 if d_head == 256 else 16)
    assert kernel.registers * kernel.threads <= 64 * 1024
    assert occupancy(kernel, "sm_90a").blocks_per_sm == 1
    assert kernel.arch == "sm_90a"


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("d_head", D_HEADS)
def test_no_step_of_the_top_of_the_ladder_spills(d_head, variant):
    """In machine code: neither the loop with care nor the one without touches local memory."""
    if find_disassembler() is None:
        pytest.skip(NOT_FOUND)
    listing = disassemble(compile_kernel(get_hopper_progression_configs("BF16", d_head)[-1], variant=variant).cubin)
    careful, guessing = sass_loop(listing, KV_LOOP), sass_loop(listing, [*KV_LOOP, Kind.VOTE])
    assert not set(careful.body) & set(guessing.body)
    for loop in (careful, guessing):
        assert not any(kind_of_sass(line.opcode) is Kind.LOCAL for line in loop.body)


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


def test_no_step_collects_addresses_for_the_one_that_is_computed_again():
    """Products take addresses from registers that a warp shares. The compiler may keep those of K for after an
    overflow, in a thread's own, and then moves them in every step: 47 at d_head 256."""
    if find_disassembler() is None:
        pytest.skip(NOT_FOUND)
    occasion = Occasion(DType.BF16, 256, True, LONG, LONG, GPUModel.of_architecture("H200", "sm_90"))
    listing = disassemble(compile_kernel(hopper_default(occasion), variant=CAUSAL).cubin)
    opcodes = [line.opcode for line in sass_loop(listing, [*KV_LOOP, Kind.VOTE]).body]
    before_vote = opcodes[: next(i for i, opcode in enumerate(opcodes) if opcode.startswith("BAR.RED"))]
    assert sum(opcode.startswith("HGMMA") for opcode in before_vote) == 256 // 16 + 64 // 16
    assert sum(opcode.startswith("R2UR") for opcode in before_vote) < 16


@pytest.mark.slow
@pytest.mark.parametrize("config", get_hopper_configs("BF16"), ids=str)
@pytest.mark.parametrize("variant", [PLAIN, CAUSAL], ids=["full", "causal"])
def test_every_kernel_of_the_space_spills_no_more_than_is_timed_and_serialises_nothing(config, variant):
    kernel = compile_kernel(config, variant=variant)
    assert kernel.spill_bytes <= space_of("hopper").bearable_spill_bytes
    assert SERIALISED not in kernel.program.log
