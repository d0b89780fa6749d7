"""What a launch is given: the struct that the device reads, and the inputs that are refused before it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import AttentionVariant, CompileError, DType, GPUError, parse_kernel_name_into_config, run_forward
from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.forward.launch import MAX_BLOCKS, ForwardArguments, PackedSequences
from flashwright.kernels.registry import family_of, parse_config
from flashwright.kernels.source import KernelSource, device_headers
from flashwright.kernels.tensors import DeviceTensor, TensorView
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window
from flashwright.runtime import loaded

CONFIG = parse_kernel_name_into_config("(BF16, 64, 128, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax")


def tensor(name: str, batch: int = 2, heads: int = 3, rows: int = 256, d_head: int = 64, **changes) -> DeviceTensor:
    strides = (heads * rows * d_head, rows * d_head, d_head, 1)
    return replace(DeviceTensor(name, 0x1000, DType.BF16, (batch, heads, rows, d_head), strides), **changes)


def launch(config=CONFIG, *, q=None, k=None, v=None, o=None, window=FULL, scale=None, softcap=0.0, **others):
    q, k, v = q or tensor("q"), k or tensor("k"), v or tensor("v")
    o = o or replace(q, name="out", strides=tensor("q").strides)
    options = AttentionOptions(window, scale, softcap)
    return family_of(config).launch(config, q, k, v, o, options=options, multiprocessors=4, **others)


# --- The struct ----------------------------------------------------------------------------------------------


def members(struct: type[ctypes.Structure], path: str = "", start: int = 0) -> Iterator[tuple[str, str, int, int]]:
    """(path from the outermost struct, C++ name, offset, size) of a struct's members and of their members."""
    for name, kind in struct._fields_:
        field = getattr(struct, name)
        yield path + name, f"{struct.__name__}::{name}", start + field.offset, field.size
        if issubclass(kind, ctypes.Structure):
            yield from members(kind, f"{path}{name}.", start + field.offset)


def layout_source(*, shifted_by: int = 0) -> KernelSource:
    checks = [f"static_assert(sizeof(ForwardArguments) == {ctypes.sizeof(ForwardArguments)});"]
    for path, cpp_name, offset, size in members(ForwardArguments):
        checks.append(f"static_assert(__builtin_offsetof(ForwardArguments, {path}) == {offset + shifted_by});")
        checks.append(f"static_assert(sizeof({cpp_name}) == {size});")
    text = '#include "attention/arguments.cuh"\n' + "\n".join(checks) + "\n__global__ void layout() {}\n"
    return KernelSource(text, device_headers(), "layout", "layout.cu")


def test_the_packed_struct_is_laid_out_as_the_device_reads_it():
    compile_source(layout_source(), "sm_80")


def test_the_layout_check_notices_a_member_out_of_place():
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_source(layout_source(shifted_by=8), "sm_80")


@pytest.mark.parametrize("longest", [1, 4096])
def test_packed_launches_grow_with_rows_and_sequences_and_not_with_the_longest(longest):
    config = parse_kernel_name_into_config("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    rows, sequences, heads = 5000, 1000, 2
    tensors = [DeviceTensor(name, 16, DType.BF16, (1, heads, rows, 64), (0, 64, heads * 64, 1)) for name in "qkvo"]
    packed = PackedSequences(sequences, 16, 16, longest, longest)
    launch = family_of(config).launch(config, *tensors, packed=packed, multiprocessors=132)
    assert launch.grid == (rows // config.B_r + sequences, heads, 1)


@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 5),
    q_blocks=st.integers(1, 9),
    kv_blocks=st.integers(1, 9),
    padding=st.integers(0, 8).map(lambda n: 8 * n),
    lse=st.integers(0, 2**48).map(lambda n: 16 * n),
)
def test_addresses_strides_lengths_and_grid_are_those_of_the_tensors(batch, heads, q_blocks, kv_blocks, padding, lse):
    def padded(name: str, address: int, rows: int) -> DeviceTensor:
        row = 64 + padding
        return tensor(name, batch, heads, rows, address=address, strides=(heads * rows * row, rows * row, row, 1))

    tensors = {
        "q": padded("q", 0x10, 128 * q_blocks),
        "k": padded("k", 0x20, 32 * kv_blocks),
        "v": padded("v", 0x30, 32 * kv_blocks),
        "o": padded("out", 0x40, 128 * q_blocks),
    }
    made = launch(**tensors, lse_address=lse)
    assert made.grid == (q_blocks, heads, batch)
    for name, given_tensor in tensors.items():
        view: TensorView = getattr(made.arguments, name.upper())
        strides = (view.batch_stride, view.head_stride, view.row_stride)
        of_batch, *within = given_tensor.strides[:3]  # that of a batch of one means nothing
        assert (view.data, strides) == (given_tensor.address, (0 if batch == 1 else of_batch, *within))
    arguments = made.arguments
    assert (arguments.lse, arguments.q_length, arguments.kv_length) == (lse, 128 * q_blocks, 32 * kv_blocks)
    assert (arguments.q_blocks, arguments.q_heads, arguments.batches) == (q_blocks, heads, batch)


@pytest.mark.parametrize(("scale", "expected"), [(None, 1 / math.sqrt(64)), (0.5, 0.5), (2, 2.0)])
def test_the_scale_is_the_one_given_or_one_over_the_root_of_d_head(scale, expected):
    assert launch(scale=scale).arguments.softmax_scale == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("window", "features"),
    [
        (FULL, set()),
        (Window(right=0), {"masks_right"}),
        (Window(left=10, right=0), {"masks_left", "masks_right"}),
        (Window(left=10), {"masks_left"}),
        (Window(right=0, bottom_right=False), {"masks_right"}),
    ],
)
@pytest.mark.parametrize(("q_rows", "kv_rows"), [(256, 256), (200, 256), (256, 40), (1, 256), (1, 1)])
def test_a_kernel_has_the_features_that_are_requested_whatever_the_lengths(q_rows, kv_rows, window, features):
    made = launch(q=tensor("q", rows=q_rows), k=tensor("k", rows=kv_rows), v=tensor("v", rows=kv_rows), window=window)
    assert made.variant == AttentionVariant(**dict.fromkeys(features, True))
    assert made.grid == (-(-q_rows // CONFIG.B_r), 3, 2)


@pytest.mark.parametrize(
    ("short_form", "grid"),
    [
        ("(BF16, 64, 64, 64, 4): async+load_0_2_2_tiles", (2, 2, 35_000)),  # two layers of batches
        ("hopper (BF16, 64, 64, 64): stages_1", (140_000, 1, 1)),
    ],
)
def test_a_batch_of_seventy_thousand_is_launched(short_form, grid):
    config = parse_config(short_form)
    many = {name: tensor(name, batch=70_000, heads=2, rows=16) for name in "qkv"}
    assert launch(config, **many, o=tensor("out", batch=70_000, heads=2, rows=16)).grid == grid


def test_fewer_columns_or_heads_are_features_too():
    narrow = {name: tensor(name, d_head=40) for name in "qkv"}
    assert launch(**narrow, o=tensor("out", d_head=40)).variant == AttentionVariant(head_dim=40)
    assert launch(q=tensor("q", heads=6)).variant == AttentionVariant(grouped_heads=True)
    assert launch(softcap=30.0).variant == AttentionVariant(softcaps=True)


# --- Inputs that are refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "what_is_said"),
    [
        ({"q": tensor("q", dtype=DType.FP16)}, "q: dtype is FP16, but the config computes BF16"),
        ({"v": tensor("v", dtype=DType.FP16)}, "v: dtype is FP16, but the config computes BF16"),
        (
            {"k": tensor("k", d_head=128)},
            "k: head_dim is 128, .*multiples of 8 up to d_head = 64",
        ),
        (
            {"q": replace(tensor("q"), shape=(3, 256, 64), strides=(256 * 64, 64, 1))},
            r"q: shape \(3, 256, 64\) has 3 dimensions; expected 4",
        ),
        ({"k": replace(tensor("k"), shape=(1, 2, 3, 256, 64))}, "k: .*has 5 dimensions; expected 4"),
        ({"v": tensor("v", rows=128)}, r"k and v must have the same shape; got .*256.*128"),
        ({"q": tensor("q", heads=4)}, "q has 4 heads, which is not a multiple of the 3 heads of k and v"),
        ({"q": tensor("q", batch=1)}, r"q and k must agree in batch and head_dim; got \(1, .* and \(2, "),
        ({name: tensor(name, d_head=60) for name in "qkv"}, "head_dim is 60, .*multiples of 8"),
        ({"q": tensor("q", rows=0)}, "q: 0 rows are not allowed"),
        ({"k": tensor("k", rows=0), "v": tensor("v", rows=0)}, "k: 0 rows are not allowed"),
        ({"softcap": -1.0}, "softcap: -1.0 .*positive"),
        ({"packed": PackedSequences(4, 0, 0, 64, 64)}, "packed sequences need tensors of batch 1; got 2"),
        ({name: tensor(name, batch=0) for name in "qkv"}, "batch: 0"),
        (
            {name: tensor(name, batch=2**20, heads=2**10, rows=1024) for name in "qkv"},
            rf"batch 1048576 × 1024 heads × 1024 rows are 8589934592 tiles of 128 rows; allowed: up to {MAX_BLOCKS}",
        ),
        ({name: tensor(name, heads=65_536) for name in "qkv"}, "heads: 65536 are not allowed; allowed: up to 65535"),
        ({"q": tensor("q", address=0x1008)}, "q: address 0x1008 is not aligned to 16 bytes"),
        ({"o": tensor("out", address=0x1002)}, "out: address 0x1002 is not aligned to 16 bytes"),
        ({"k": tensor("k", strides=(49152, 16384, 68, 1))}, "k: the row stride of 68 elements is not a multiple of 8"),
        ({"v": tensor("v", strides=(49152, 16388, 64, 1))}, "v: the head stride of 16388 elements"),
        ({"o": tensor("out", strides=(49156, 16384, 64, 1))}, "out: the batch stride of 49156 elements"),
        ({"k": tensor("k", strides=(49152, 16384, 1, 256))}, "k: the last dimension has stride 256; it must be contig"),
        ({"scale": 0.0}, "scale: 0.0 .*positive"),
        ({"scale": -1.0}, "scale: -1.0 .*positive"),
        ({"scale": math.inf}, "scale: inf .*positive"),
        ({"scale": math.nan}, "scale: nan .*positive"),
        ({"scale": 1e39}, r"scale: 1e\+39 .*finite"),  # infinite as the fp32 number that the kernel gets
    ],
)
def test_an_input_the_kernel_does_not_compute_is_refused_with_what_it_would_take(inputs, what_is_said):
    with pytest.raises(ValueError, match=what_is_said):
        launch(**inputs)


def test_strides_of_dimensions_of_one_element_do_not_matter():
    one = tensor("q", batch=1, heads=1, strides=(3, 5, 64, 1))
    launch(q=one, k=replace(one, name="k"), v=replace(one, name="v"), o=replace(one, name="out"))


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_a_kernel_with_a_static_row_stride_takes_only_tensors_of_that_stride(name):
    config = replace(CONFIG, static_row_stride=64)
    launch(config)
    wrong = tensor("out" if name == "o" else name, strides=(2 * 49152, 2 * 16384, 128, 1))
    with pytest.raises(ValueError, match=r"the row stride is 128 elements, .*static_row_stride = 64"):
        launch(config, **{name: wrong})


# --- GPUs that are refused -----------------------------------------------------------------------------------


def test_tensors_that_are_not_on_a_gpu_are_refused():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16)
    with pytest.raises(GPUError, match="q is on cpu, not on a GPU"):
        run_forward(CONFIG, q, q, q)
    with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got list"):
        run_forward(CONFIG, [1.0], q, q)


@pytest.mark.parametrize(
    ("capability", "shared_kib", "what_is_said"),
    [
        ((7, 5), 64, r"Example GPU has compute capability 7\.5; the kernels need 8\.0"),
        ((8, 6), 99, r"needs 131072 bytes of shared memory per block; Example GPU has 101376"),
    ],
)
def test_a_gpu_that_cannot_run_a_kernel_is_refused_with_what_it_lacks(
    monkeypatch, capability, shared_kib, what_is_said
):
    major, minor = capability
    gpu = SimpleNamespace(name="Example GPU", major=major, minor=minor, shared_memory_per_block_optin=shared_kib * 1024)
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: gpu)
    config = parse_kernel_name_into_config("(BF16, 128, 256, 128, 8): async+load_2_2_2_tiles")
    with pytest.raises(GPUError, match=what_is_said):
        loaded.loaded_kernel(config, AttentionVariant(), 0)
