"""The Hopper kernels on a Hopper GPU: no race, no hang, nothing read or written that is not theirs.

That they are right on any problem, the tests of all families show.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashwright import AttentionOptions, Window, parse_hopper_config, run_forward
from flashwright.choice.choose import untuned_config
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.kernels.forward.hopper.config import D_HEADS, HopperForwardKernelConfig
from flashwright.kernels.registry import family_named
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LONG, MEDIUM
from flashwright.runtime.reference import attention_reference

from .tools import ERROR, TORCH_DTYPES, starts_of, this_gpu
from .tools import some as random_tensors

HOPPER = family_named("hopper")
REPEATS = [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.long])]
CAUSAL = Window(right=0)
ALL = "stages_2+overlap+ping_pong+persistent+lazy+guess"
GUARD = 7.0


@pytest.fixture(autouse=True)
def a_hopper_gpu(arch) -> None:
    if not HOPPER.runs_on(arch):
        pytest.skip(f"the GPU is an {arch}; the Hopper kernels need sm_90")


def some(
    config: HopperForwardKernelConfig, q_rows: int, kv_rows: int, *, batch: int = 2, heads: tuple[int, int] = (4, 2)
) -> tuple[Any, Any, Any]:
    q_shape, kv_shape = ((batch, n, rows, config.d_head) for n, rows in zip(heads, (q_rows, kv_rows), strict=True))
    return random_tensors(TORCH_DTYPES[config.dtype], q_shape, kv_shape, seed=q_rows + kv_rows)


def default_config(d_head: int, *, causal: bool, q_bucket: str) -> KernelConfig:
    """What is good by experience, whatever was tuned."""
    return untuned_config(HOPPER, Occasion(DType.BF16, d_head, causal, q_bucket, q_bucket, this_gpu()))


def assert_right(out: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    expected, _ = attention_reference(*(x.double() for x in (q, k, v)), options=AttentionOptions(**options))
    assert not out.isnan().any().item()
    assert ((out.double() - expected).norm() / expected.norm()).item() <= ERROR[out.dtype]


# --- Races -------------------------------------------------------------------------------------------------------

REPEATED = {
    "full": (f"(BF16, 128, 128, 128): {ALL}", (1024, 1024), {}),
    "causal": (f"(BF16, 128, 128, 128): {ALL}", (1000, 1000), {"window": CAUSAL}),
    "without turns": (
        "(BF16, 128, 128, 128): stages_2+overlap+persistent+lazy+guess",
        (1000, 1000),
        {"window": CAUSAL},
    ),
    "without guesses": ("(BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy", (1024, 1024), {}),
    "three consumers": (f"(FP16, 64, 192, 128): {ALL}", (777, 1111), {"window": CAUSAL}),
    "three stages": ("(BF16, 64, 128, 128): stages_3+overlap+ping_pong+persistent+lazy", (900, 900), {}),
    "wide heads, a window": (f"(BF16, 256, 128, 64): {ALL}", (513, 700), {"window": Window(left=100, right=50)}),
    "one stage": ("(BF16, 128, 64, 64): stages_1", (500, 500), {}),
    "one tile a block": ("(FP16, 128, 128, 96): stages_2+overlap+ping_pong+lazy", (640, 333), {"softcap": 9.0}),
}


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("case", REPEATED.values(), ids=list(REPEATED))
def test_repeated_launches_give_the_same_bits(case, repeats):
    """While another stream keeps the GPU's memory busy, so that copies arrive when they like."""
    text, lengths, options = case
    config = parse_hopper_config(f"hopper {text}")
    q, k, v = some(config, *lengths)
    first, first_lse = run_forward(config, q, k, v, return_lse=True, **options)
    assert_right(first, q, k, v, **options)
    out, differences = torch.empty_like(first), torch.zeros((), dtype=torch.int64, device="cuda")
    noise, source = torch.cuda.Stream(), torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    for number in range(repeats):
        if number % 50 == 0:
            with torch.cuda.stream(noise):
                source.add_(1)
        out.fill_(math.nan)
        _, lse = run_forward(config, q, k, v, out=out, return_lse=True, **options)
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum() + (lse != first_lse).sum()
    assert differences.item() == 0


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=["full", "causal"])
def test_packed_sequences_give_the_same_bits_every_time(window, repeats):
    config = parse_hopper_config(f"hopper (BF16, 128, 128, 128): {ALL}")
    lengths = [0, 1, 127, 128, 129, 300, 64, 0, 500]
    starts = starts_of(lengths)
    q, k, v = some(config, sum(lengths), sum(lengths), batch=1)
    options = {"window": window, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    first = run_forward(config, q, k, v, max_seqlen_q=500, max_seqlen_k=500, **options)
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        if length:
            rows = slice(begin, begin + length)
            assert_right(first[:, :, rows], q[:, :, rows], k[:, :, rows], v[:, :, rows], window=window)
    out, differences = torch.empty_like(first), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(repeats):
        out.fill_(math.nan)
        run_forward(config, q, k, v, out=out, max_seqlen_q=500, max_seqlen_k=500, **options)
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert differences.item() == 0


def test_kernels_on_two_streams_do_not_disturb_each_other():
    """Two persistent kernels that each want all multiprocessors."""
    config = parse_hopper_config(f"hopper (BF16, 128, 128, 128): {ALL}")
    problems = [some(config, 1000, 1000), some(config, 600, 1400)]
    expected = [run_forward(config, *problem, window=CAUSAL) for problem in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    differences = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in problems]
    torch.cuda.synchronize()
    for _ in range(300):
        for stream, problem, first, count in zip(streams, problems, expected, differences, strict=True):
            with torch.cuda.stream(stream):
                count += (run_forward(config, *problem, window=CAUSAL) != first).sum()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    assert [count.item() for count in differences] == [0, 0]


# --- Guesses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["(BF16, 128, 128, 128)", "(FP16, 64, 192, 128)", "(BF16, 256, 128, 64)"])
@pytest.mark.parametrize("largest", [0.1, 3.0, 300.0])
@pytest.mark.parametrize("growing", [False, True], ids=["shrinking", "growing"])
@pytest.mark.parametrize("window", [Window(), CAUSAL], ids=["full", "causal"])
def test_maxima_that_outgrow_the_guess_are_found(text, largest, growing, window):
    """Keys that grow from block to block, up to where exponentials relative to the last maximum are infinite."""
    config = parse_hopper_config(f"hopper {text}: {ALL}")
    q, k, v = some(config, 1000, 1500)
    growth = torch.logspace(-1, math.log10(largest), 1500, device="cuda")
    k = (k * (growth if not growing else growth.flip(0))[:, None]).to(k.dtype)  # the last keys are visited first
    out = torch.full_like(q, math.nan)
    run_forward(config, q, k, v, out=out, window=window)
    assert_right(out, q, k, v, window=window)


# --- Memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 200), (129, 65), (500, 1000), (1000, 3)], ids=str)
def test_incomplete_tiles_write_their_rows_and_no_others(d_head, causal, lengths):
    """In tensors whose other rows and columns are NaN: what is read of them would be seen, what is written as well."""
    config = default_config(d_head, causal=causal, q_bucket=MEDIUM)
    window = CAUSAL if causal else Window()
    q, k, v = (surrounded(x, math.nan) for x in some(config, *lengths))
    out = surrounded(torch.full_like(q, math.nan), GUARD)
    _, lse = run_forward(config, q, k, v, window=window, out=out, return_lse=True)
    expected, expected_lse = attention_reference(*(x.double() for x in (q, k, v)), options=AttentionOptions(window))
    assert not out.isnan().any().item()
    assert (out.double() - expected).norm() <= ERROR[out.dtype] * expected.norm()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)
    whole = out._base
    out.fill_(GUARD)
    assert (whole == GUARD).all().item()


def surrounded(x: Any, value: float) -> Any:
    """The same values within a larger tensor of another value."""
    batch, heads, rows, columns = x.shape
    whole = torch.full((batch, heads, rows + 200, columns + 16), value, dtype=x.dtype, device=x.device)
    inner = whole[:, :, 100 : 100 + rows, 8 : 8 + columns]
    inner.copy_(x)
    return inner


@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 120, 136, 200, 248])
def test_heads_narrower_than_the_kernels_are_padded(head_dim):
    d_head = next(d for d in D_HEADS if d >= head_dim)
    config = default_config(d_head, causal=False, q_bucket=LONG)
    q, k, v = (surrounded(x[..., :head_dim], math.nan) for x in some(config, 300, 400))
    out = surrounded(torch.full_like(q, math.nan), GUARD)
    run_forward(config, q, k, v, out=out)
    assert_right(out, q, k, v)
    whole = out._base
    out.fill_(GUARD)
    assert (whole == GUARD).all().item()


def test_what_belongs_to_no_sequence_does_not_spoil_the_others():
    config = parse_hopper_config(f"hopper (FP16, 64, 192, 96): {ALL}")
    q, k, v = some(config, 400, 400, batch=1)
    for x in (q, k, v):
        x[:, :, :50], x[:, :, 300:] = math.nan, math.inf
    starts = starts_of([80, 0, 170], first=50)
    out = torch.full_like(q, GUARD)
    run_forward(config, q, k, v, out=out, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=170, max_seqlen_k=170)
    for rows in (slice(50, 130), slice(130, 300)):
        assert_right(out[:, :, rows], q[:, :, rows], k[:, :, rows], v[:, :, rows])
    assert (out[:, :, :50] == 0).all().item() and (out[:, :, 300:] == 0).all().item()


def test_other_tensors_of_the_same_shapes_are_read_where_they_lie():
    """What the copy engine is told about a tensor is remembered between calls; where the tensor lies is not."""
    config = parse_hopper_config(f"hopper (BF16, 128, 128, 128): {ALL}")
    for _ in range(5):
        q, k, v = (torch.randn_like(x) for x in some(config, 300, 300))
        assert_right(run_forward(config, q, k, v), q, k, v)


def test_keys_that_all_heads_share_need_no_copy():
    config = parse_hopper_config(f"hopper (BF16, 128, 128, 128): {ALL}")
    q, k, v = some(config, 300, 400, heads=(4, 1))
    shared = [x.expand(-1, 4, -1, -1) for x in (k, v)]
    assert torch.equal(run_forward(config, q, *shared), run_forward(config, q, k, v))
