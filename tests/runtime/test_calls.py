"""Calls on a GPU up to the launch: new lengths get the parameters that a launch from scratch has, what is wrong is
raised however many calls went well before, and tensors that no kernel can read are planned once.

CPU tensors stand in for a GPU's, and nothing is launched.
"""

from __future__ import annotations

import ctypes
import random
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attention_cases import laid_out

from flashwright import AttentionOptions, Window, parse_config
from flashwright.hardware.tensor_map import TENSOR_MAP_BYTES, TensorMap
from flashwright.kernels.forward.launch import PackedSequences
from flashwright.kernels.registry import family_of
from flashwright.runtime import call_kinds, plans
from flashwright.runtime.call_kinds import CallKind
from flashwright.runtime.tensor_maps import WORDS, MapTemplate
from flashwright.runtime.tensors import device_tensor

AMPERE = "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
HOPPER = "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy"


MULTIPROCESSORS = 132


class NoKernel:
    """Remembers its launches: grids and parameters."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int]] = []
        self.sizes: list[int] = []
        """Bytes of the parameters to read at each launch."""
        self.parameters: list[bytes] = []

    def launch(self, grid: tuple[int, int, int], parameters_at: int, stream: int) -> None:
        self.launches.append(grid)
        if self.sizes:
            addresses = (ctypes.c_uint64 * len(self.sizes)).from_address(parameters_at)
            self.parameters = [ctypes.string_at(*each) for each in zip(addresses, self.sizes, strict=True)]


def encoded(tensor_map: TensorMap) -> list[int]:
    """A tensor map in an invented format: the address, then the bits of sizes and strides one after the other."""
    bits, place = 0, 0
    for size in tensor_map.shape:
        bits, place = bits | (size - 1) << place, place + 32
    for stride in tensor_map.strides:
        bits, place = bits | stride // 16 << place, place + 36
    words = [bits >> 64 * i & 2**64 - 1 for i in range(WORDS - 2)]
    return [tensor_map.address, tensor_map.box[1], *words]


@pytest.fixture
def kernel(monkeypatch) -> NoKernel:
    kernel = NoKernel()
    monkeypatch.setattr(plans, "loaded_kernel", lambda *of: kernel)
    monkeypatch.setattr(plans, "map_template", cache(lambda kind: MapTemplate(kind, encoded)))
    for module in (call_kinds, plans):
        monkeypatch.setattr(module, "multiprocessors", lambda device_index: MULTIPROCESSORS)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device_index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return kernel


@pytest.fixture(params=[AMPERE, HOPPER], ids=["ampere", "hopper"])
def kind(request, kernel) -> CallKind:
    config = parse_config(request.param)
    return CallKind(AttentionOptions(), lambda *sizes: config, returns_lse=False, device_index=0)


def some(*shape: int) -> tuple[Any, Any, Any]:
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def starts(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


# --- New lengths -----------------------------------------------------------------------------------------------------


def random_tensors(draw: random.Random) -> tuple[Any, Any, Any]:
    """Of random sizes, each in a layout that kernels read: contiguous, rows before heads, or a part of a longer
    cache."""
    batch, kv_heads, groups = draw.choice([1, 1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 1, 4])
    q_rows, keys = (draw.choice([1, 2, draw.randint(3, 64), draw.randint(65, 1000)]) for _ in range(2))
    head_dim = draw.choice([72, 128])

    def tensor(heads: int, rows: int) -> Any:
        match draw.choice(["contiguous", "rows before heads", "part of a cache"]):
            case "contiguous":
                return torch.zeros(batch, heads, rows, head_dim, dtype=torch.bfloat16)
            case "rows before heads":
                return torch.zeros(batch, rows, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)
        return torch.zeros(batch, heads, rows + 8, head_dim, dtype=torch.bfloat16)[:, :, :rows]

    return tensor(kv_heads * groups, q_rows), tensor(kv_heads, keys), tensor(kv_heads, keys)


@pytest.mark.parametrize("window", [Window(), Window(right=0), Window(left=300, right=0)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("text", [AMPERE, HOPPER], ids=["ampere", "hopper"])
def test_new_lengths_get_the_parameters_of_a_launch_from_scratch(kernel, text, packed, window):
    """All but the schedule of the first call, which may be one that is made at once."""
    config, draw = parse_config(text), random.Random(f"{text}{packed}{window}")
    options = AttentionOptions(window)
    kind = CallKind(options, lambda *sizes: config, returns_lse=True, device_index=0)
    for _ in range(120):
        q, k, v = random_tensors(draw)
        both = some_packing = None
        if packed:
            q, k, v = (x[:1] for x in (q, k, v))
            both = (starts(0, q.shape[2]), starts(0, k.shape[2]))
            some_packing = (draw.randint(1, 9), draw.randint(65, 1000), draw.randint(65, 1000))
        sequences = some_packing and PackedSequences(
            some_packing[0], both[0].data_ptr(), both[1].data_ptr(), *some_packing[1:]
        )
        for call in (1, 2, 3):
            compare_with_scratch(kernel, kind, config, (q, k, v), both, some_packing, sequences, first=call == 1)


@pytest.mark.parametrize("text", [AMPERE, HOPPER], ids=["ampere", "hopper"])
def test_a_cache_may_shrink_to_one_row_and_grow_again(kernel, text):
    """One row has no stride; two have."""
    config, cache_ = parse_config(text), torch.zeros(2, 4, 50, 128, dtype=torch.bfloat16)
    kind = CallKind(AttentionOptions(), lambda *sizes: config, returns_lse=True, device_index=0)
    for rows in (1, 2, 1, 7, 1, 1, 3):
        part = cache_[:, :, :rows]
        for _ in range(2):
            compare_with_scratch(kernel, kind, config, (part, part, part), first=True)
        kind.arrangements.clear()


def compare_with_scratch(
    kernel: NoKernel,
    kind: CallKind,
    config: Any,
    tensors: tuple[Any, Any, Any],
    both: Any = None,
    packing: Any = None,
    sequences: PackedSequences | None = None,
    *,
    first: bool,
) -> None:
    """Runs a call and compares its parameters; the `first` of its lengths may have another schedule."""
    q, k, v = tensors
    out = torch.empty_like(q)
    views = [device_tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))]
    launch = family_of(config).launch(
        config, *views, options=kind.options, lse_address=1, packed=sequences, multiprocessors=MULTIPROCESSORS
    )
    expected = [each for each in launch.parameters if not isinstance(each, TensorMap)]
    kernel.sizes = [TENSOR_MAP_BYTES] * len(launch.tensor_maps) + [ctypes.sizeof(each) for each in expected]
    written, lse = kind.run(q, k, v, out if packing is not None else None, both, packing)
    launch.arguments.O.data, launch.arguments.lse = written.data_ptr(), lse.data_ptr()
    maps = [b"".join(word.to_bytes(8, "little") for word in encoded(each)) for each in launch.tensor_maps]
    found = kernel.parameters
    at = len(maps)
    found[at] = _without_inputs(found[at], launch.arguments) if maps else found[at]
    compared = len(found) - 1 if launch.schedule is not None and first else len(found)
    assert found[:compared] == [*maps, *map(bytes, expected)][:compared]
    assert kernel.launches[-1] == launch.grid


def _without_inputs(found: bytes, expected: ctypes.Structure) -> bytes:
    arguments = type(expected).from_buffer_copy(found)
    for name in "QKV":
        getattr(arguments, name).data = getattr(expected, name).data
    return bytes(arguments)


# --- Calls that are refused ------------------------------------------------------------------------------------------


WRONG = {
    "head dimension": (lambda q, k, v: (q[..., :60], k[..., :60], v[..., :60]), r"q: head_dim 60 is not allowed"),
    "heads": (lambda q, k, v: (q, k[:, :3], v[:, :3]), r"q has 4 heads, which is not a multiple of the 3"),
    "lengths": (lambda q, k, v: (q, k, v[:, :, 1:]), r"k and v must have the same shape"),
    "batch": (lambda q, k, v: (q, k[:1], v[:1]), r"k: batch is 1, but q's is 2"),
    "columns of the output": (
        lambda q, k, v: (q, k, v, torch.zeros_like(q.mT.contiguous()).mT),
        r"out: the last dimension has stride 300",
    ),
    "rows of the output": (
        lambda q, k, v: (q, k, v, laid_out(q, "padded rows")),
        r"out: .* is not a multiple of 8 \(16 bytes\)",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_call_is_refused_after_a_good_one(kind, kernel, spoil, message):
    tensors = some(2, 4, 300, 128)
    kind.run(*tensors)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            kind.run(*spoil(*tensors))
    assert len(kernel.launches) == 1


def test_packed_sequences_of_two_batches_are_refused_after_a_good_call(kind, kernel):
    both = (starts(0, 100, 300), starts(0, 100, 300))
    kind.run(*some(1, 4, 300, 128), None, both, (2, 200, 200))
    with pytest.raises(ValueError, match="packed sequences need tensors of batch 1; got 2"):
        kind.run(*some(2, 4, 300, 128), None, both, (2, 200, 200))
    assert len(kernel.launches) == 1


def test_sequences_without_rows_are_launched(kind, kernel):
    """The kernel writes the rows of no sequence, and a launch has at least one thread block."""
    both = (starts(0, 0, 0), starts(0, 0, 0))
    kind.run(*some(1, 4, 300, 128), None, both, (2, 0, 0))
    assert min(kernel.launches[0]) >= 1


# --- Tensors that no kernel can read ---------------------------------------------------------------------------------


def off_by_one_element(x: Any) -> Any:
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


@pytest.mark.parametrize(
    "move",
    [off_by_one_element, lambda x: laid_out(x, "padded rows"), lambda x: laid_out(x, "transposed")],
    ids=["address", "strides", "columns"],
)
def test_tensors_that_no_kernel_can_read_are_planned_once(kind, kernel, move, monkeypatch):
    tensors = [move(x) for x in some(2, 4, 300, 128)]
    kind.run(*tensors)
    planned: list[Any] = []
    arrange = CallKind._arrange
    monkeypatch.setattr(CallKind, "_arrange", lambda *arguments: planned.append(arguments) or arrange(*arguments))
    for _ in range(3):
        out, _ = kind.run(*tensors)
        assert out.shape == tensors[0].shape
    assert planned == [] and len(kernel.launches) == 4
