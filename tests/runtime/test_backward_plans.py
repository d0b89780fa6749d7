"""The backward on a GPU up to its launches, and what they compute: CPU tensors stand in for a GPU's."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attention_cases import laid_out, relative_error
from fake_gpu import MULTIPROCESSORS, FakeGPU, scattered
from simulating_gpu import SimulatingGPU

from flashwright.kernels.backward.launch import DQ, ROWS, BackwardArguments, Scratch
from flashwright.kernels.forward.launch import PackedSequences
from flashwright.kernels.launch import Sizes
from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime.backward import run_backward
from flashwright.runtime.backward_plans import TENSORS, BackwardKind
from flashwright.runtime.reference import attention_gradients, attention_reference
from flashwright.runtime.tensors import device_tensor

CONFIG = parse_config("ampere backward (BF16, 64, 32, 32, 2): stages_2_1+swizzled")
HOPPER = parse_config("hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P")
ERROR = 8e-3
"""Relative, of gradients in bf16: P, dS and the gradients themselves are rounded."""


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


@pytest.fixture
def simulated(monkeypatch):
    return SimulatingGPU(monkeypatch)


def some(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def starts(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def problem(heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, options: AttentionOptions) -> list[Any]:
    """do, q, k, v, out, lse."""
    (q_heads, kv_heads), (rows, keys) = heads, lengths
    do, q = (some(1, q_heads, rows, head_dim, seed=seed) for seed in (1, 2))
    k, v = (some(1, kv_heads, keys, head_dim, seed=seed) for seed in (3, 4))
    return [do, q, k, v, *attention_reference(q, k, v, options=options)]


def true_gradients(do: Any, dlse: Any, q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    return attention_gradients(do.double(), dlse, q.double(), k.double(), v.double(), options=options)


def assert_right(gradients: Any, expected: Any) -> None:
    for name, gradient, truth in zip("qkv", gradients, expected, strict=True):
        assert gradient.shape == truth.shape
        assert relative_error(gradient, truth) <= ERROR, name


# --- What is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "lengths", "head_dim", "options", "layout"),
    [
        ((4, 2), (50, 70), 64, AttentionOptions(Window(None, 0)), "rows first"),
        ((2, 1), (33, 33), 40, AttentionOptions(Window(None, 3, False), softcap=3.0), "padded rows"),
        pytest.param((2, 2), (70, 40), 64, AttentionOptions(Window(20, 0)), "part of qkv", marks=pytest.mark.slow),
        pytest.param((1, 1), (20, 50), 64, AttentionOptions(scale=0.3), "transposed", marks=pytest.mark.slow),
    ],
    ids=["grouped heads", "soft cap", "rows without keys", "scale"],
)
def test_gradients_are_right_whatever_the_layout(simulated, heads, lengths, head_dim, options, layout):
    kind = BackwardKind(options, lambda *sizes: CONFIG, device_index=0)
    do, q, k, v, out, lse = problem(heads, lengths, head_dim, options)
    dlse = some(*lse.shape, seed=5).float()
    expected = true_gradients(do, dlse, q, k, v, options)
    arranged = [laid_out(x, layout) for x in (do, q, k, v, out)]
    for _ in range(2):  # a plan that is made, and one that is kept
        gradients = kind.run(*arranged, lse, dlse)
        assert_right(gradients, expected)
        for gradient, x in zip(gradients, arranged[1:4], strict=True):
            assert gradient.stride() in (torch.empty_like(x).stride(), x.contiguous().stride())
    assert simulated.launches == 2 * [("ampere backward", ROWS), ("ampere backward", None), ("ampere backward", DQ)]


def test_a_gradient_that_is_one_number_for_all_elements_is_enough(simulated):
    options = AttentionOptions()
    _, q, k, v, out, lse = problem((2, 2), (20, 30), 64, options)
    do = torch.ones((), dtype=torch.bfloat16).expand_as(out)
    gradients = BackwardKind(options, lambda *sizes: CONFIG, device_index=0).run(do, q, k, v, out, lse)
    assert_right(gradients, true_gradients(do, None, q, k, v, options))


def test_packed_sequences_have_gradients_of_their_own_and_rows_of_none_have_0(simulated):
    options = AttentionOptions(Window(None, 0))
    parts = [(slice(5, 45), slice(3, 30)), (slice(45, 45), slice(30, 40)), (slice(45, 50), slice(40, 77))]
    do, q, k, v, out, lse = problem((2, 1), (60, 80), 64, options)
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf)
    for rows, keys in parts:
        sequence = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        out[:, :, rows], lse[:, :, rows] = attention_reference(*sequence, options=options)
        found = true_gradients(do[:, :, rows], None, *sequence, options)
        for target, part, gradient in zip(expected, (rows, keys, keys), found, strict=True):
            target[:, :, part] = gradient
    kind = BackwardKind(options, lambda *sizes: CONFIG, device_index=0)
    gradients = kind.run(do, q, k, v, out, lse, None, (starts(5, 45, 45, 50), starts(3, 30, 40, 77)), (3, 40, 37))
    assert_right(gradients, expected)
    assert not gradients[0][:, :, 50:].any() and not gradients[1][:, :, :3].any()
    by_the_simulator = run_backward(
        CONFIG, do, q, k, v, out, lse, window=options.window, cu_seqlens_q=starts(5, 45, 45, 50),
        cu_seqlens_k=starts(3, 30, 40, 77), device="simulator",
    )  # fmt: skip
    for gradient, other in zip(gradients, by_the_simulator, strict=True):
        assert torch.equal(gradient, other)


# --- What launches are given -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("config", [CONFIG, HOPPER], ids=["ampere", "hopper"])
def test_every_launch_has_the_parameters_of_one_from_scratch(gpu, config, packed):
    options = AttentionOptions(Window(100, 0), softcap=7.0)
    kind = gpu.backward_kind(options, lambda *sizes: config)
    draw = random.Random(f"{config}{packed}")
    for _ in range(30):
        batch = 1 if packed else draw.choice([1, 3])
        heads, rows, keys = draw.choice([(2, 2), (4, 1)]), draw.randint(1, 900), draw.randint(1, 900)
        q, k, v = (
            laid_out(torch.zeros(batch, *sizes, 48, dtype=torch.bfloat16), draw.choice(["rows first", "part of qkv"]))
            for sizes in ((heads[0], rows), (heads[1], keys), (heads[1], keys))
        )
        out, do, lse = torch.zeros_like(q), torch.zeros_like(q), torch.zeros(q.shape[:3])
        dlse = torch.zeros_like(lse) if draw.random() < 0.5 else None
        both = (starts(0, rows), starts(0, keys)) if packed else None
        sizes = (draw.randint(1, 5), draw.randint(0, 300), draw.randint(0, 300)) if packed else None
        for _ in range(2):
            gpu.allocated.clear()
            gradients = kind.run(do, q, k, v, out, lse, dlse, both, sizes)
            (scratch,) = gpu.allocated
            views = [device_tensor(*each) for each in zip(TENSORS, (q, k, v, out, do, *gradients), strict=True)]
            launch = family_of(config).launch(
                config, *views, lse_address=lse.data_ptr(), dlse_address=0 if dlse is None else dlse.data_ptr(),
                scratch_address=scratch.data_ptr(), options=options, multiprocessors=MULTIPROCESSORS,
                packed=sizes and PackedSequences(sizes[0], both[0].data_ptr(), both[1].data_ptr(), *sizes[1:]),
            )  # fmt: skip
            maps = [b"".join(word.to_bytes(8, "little") for word in scattered(each)) for each in launch.tensor_maps]
            assert len(maps) == (4 if config is HOPPER else 0)
            arguments = bytes(launch.arguments)
            last = {each.companion: each.launches[-1] for each in gpu.kernels if each.variant == launch.variant}
            assert last[None] == (launch.grid, [*maps, arguments])
            assert last[ROWS] == last[DQ] == (launch.rows_grid, [arguments])


def test_a_backward_works_in_as_much_memory_as_its_rows_need(gpu):
    kind = gpu.backward_kind(AttentionOptions(), lambda *sizes: CONFIG)
    kind.run(*problem((4, 2), (50, 70), 64, AttentionOptions()))
    (scratch,) = gpu.allocated
    assert scratch.numel() == Scratch.of(CONFIG, Sizes(1, 4, 2, 50, 70)).total
    rows = 4 * 64  # of whole blocks
    assert scratch.numel() <= rows * (64 + 3) * 4 + 4 * Scratch.ALIGNMENT


def test_new_lengths_load_no_kernel(gpu):
    kind = gpu.backward_kind(AttentionOptions(Window(None, 0)), lambda *sizes: CONFIG)
    for rows in range(65, 400, 31):
        kind.run(*problem((2, 2), (rows, rows), 64, AttentionOptions()))
    assert [kernel.companion for kernel in gpu.kernels] == [ROWS, None, DQ]


def test_launches_of_several_threads_at_once_have_parameters_of_their_own(gpu):
    kind = gpu.backward_kind(AttentionOptions(), lambda *sizes: CONFIG)
    first, second = (problem((2, 2), (rows, rows), 64, AttentionOptions()) for rows in (100, 200))
    kind.run(*first)
    rows, own, dq = gpu.kernels
    record = own.launch

    def launch_amid_another(grid: Any, parameters_at: int, stream: int) -> None:
        """Before the driver has copied the parameters, another call is launched."""
        own.launch = record
        kind.run(*second)
        record(grid, parameters_at, stream)

    own.launch = launch_amid_another
    kind.run(*first)
    found = [BackwardArguments.from_buffer_copy(kernel.launches[-1][1][0]).forward for kernel in (rows, own, dq)]
    assert [each.q_length for each in found] == [200, 100, 100]
    assert [each.Q.data for each in found] == [second[1].data_ptr(), first[1].data_ptr(), first[1].data_ptr()]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda do, q, k, v, out, lse: (do, q[..., :60], k[..., :60], v[..., :60], out, lse), "head_dim 60"),
        (lambda do, q, k, v, out, lse: (do[:, :, 1:], q, k, v, out, lse), r"do: \(1, 2, 69, 64\) .* does not match q"),
        (lambda do, q, k, v, out, lse: (do, q, k, v[:, :, 1:], out, lse), "k and v must have the same shape"),
    ],
    ids=["head dimension", "rows of do", "rows of v"],
)
def test_a_wrong_call_is_refused_after_a_good_one(gpu, spoil, message):
    kind = gpu.backward_kind(AttentionOptions(), lambda *sizes: CONFIG)
    tensors = problem((2, 2), (70, 70), 64, AttentionOptions())
    kind.run(*tensors)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            kind.run(*spoil(*tensors))


def test_a_config_of_the_forward_computes_no_gradients():
    with pytest.raises(ValueError, match="is of the operation forward, not backward"):
        run_backward("(BF16, 64, 64, 64, 4): async+swizzled+load_0_2_2_tiles", *6 * (None,))
