"""Reductions into memory: vectors of atom and red, and bulk copies that combine with what is there."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle, TensorMap
from flashwright.simulator import SimulatedGPU, SimulationError

from .hopper_tools import HEADER_90A

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "bf16": BF16,
    "u32": np.dtype(np.uint32), "s32": np.dtype(np.int32), "u64": np.dtype(np.uint64), "s64": np.dtype(np.int64),
    "b32": np.dtype(np.uint32), "b64": np.dtype(np.uint64),
}  # fmt: skip


def numbers(name: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(name) + sum(shape))
    dtype = DTYPES[name]
    return (rng.standard_normal(shape) if name.strip("b")[0] == "f" else rng.integers(0, 50, shape)).astype(dtype)


def combined(operation: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What a reduction leaves, in the precision of its type."""
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    if operation == "inc":
        return np.where(old >= new, 0, old + 1).astype(old.dtype)
    if operation == "dec":
        return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    return {**functions, "xor": np.bitwise_xor}[operation](old, new).astype(old.dtype)


# Vectors ----------------------------------------------------------------------------------------------------------


def vector_kernel(instruction: str, count: int, bits: int) -> str:
    """Thread t applies ``instruction`` with its vector of values to row t % 8 of out; %o is what it found there."""
    values, old = ("{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}" for name in "vo")
    row = count * bits // 8
    offsets = [i * bits // 8 for i in range(count)]
    lines = [
        ".visible .entry k(.param .u64 out, .param .u64 values, .param .u64 seen) {",
        f".reg .b64 %out, %in, %seen, %policy; .reg .b32 %t, %row; .reg .b{bits} %v<{count}>, %o<{count}>;",
        "ld.param.u64 %out, [out]; ld.param.u64 %in, [values]; ld.param.u64 %seen, [seen];",
        "mov.u32 %t, %tid.x; and.b32 %row, %t, 7; createpolicy.fractional.L2::evict_last.b64 %policy, 1.0;",
        *(f"mad.wide.u32 %{p}, %{i}, {row}, %{p};" for p, i in (("out", "row"), ("in", "t"), ("seen", "t"))),
        *(f"ld.global.b{bits} %v{i}, [%in+{offset}]; mov.b{bits} %o{i}, %v{i};" for i, offset in enumerate(offsets)),
        instruction.replace("VALUES", values).replace("OLD", old),
        *(f"st.global.b{bits} [%seen+{offset}], %o{i};" for i, offset in enumerate(offsets)),
        "ret; }",
    ]
    return HEADER_90A + "\n".join(lines)


def run_vectors(
    instruction: str, old: np.ndarray, values: np.ndarray, count: int, gpu: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """out and what each thread found, after 32 threads have added to 8 rows."""
    gpu = gpu or SimulatedGPU("sm_90a")
    out, seen = gpu.to_device(old), gpu.to_device(np.zeros_like(values))
    bits = old.dtype.itemsize * 8 * old.shape[1] // count
    gpu.load(vector_kernel(instruction, count, bits)).launch("k", 1, 32, 0, [out, gpu.to_device(values), seen])
    return gpu.to_host(out), gpu.to_host(seen)


VECTORS = [
    ("add.v2.f32", "f32", 2, 2),
    ("add.v4.f32", "f32", 4, 4),
    ("add.noftz.v4.f16x2", "f16", 8, 4),
    ("max.noftz.v2.f16x2", "f16", 4, 2),
    ("add.noftz.v4.bf16x2", "bf16", 8, 4),
    ("min.noftz.v2.bf16x2", "bf16", 4, 2),
    ("add.noftz.v8.f16", "f16", 8, 8),
    ("add.noftz.v2.bf16", "bf16", 2, 2),
]


@pytest.mark.parametrize(("suffix", "name", "columns", "count"), VECTORS)
def test_vector_reductions_combine_every_element_in_thread_order(
    suffix: str, name: str, columns: int, count: int
) -> None:
    old, values = numbers(name, 8, columns), numbers(name, 32, columns)
    expected, found = old.copy(), np.zeros_like(values)
    for thread in range(32):
        found[thread] = expected[thread % 8]
        expected[thread % 8] = combined(suffix.split(".")[0], expected[thread % 8], values[thread])
    out, _ = run_vectors(f"red.relaxed.gpu.global.{suffix} [%out], VALUES;", old, values, count)
    assert out.tobytes() == expected.tobytes()
    out, seen = run_vectors(f"atom.global.{suffix} OLD, [%out], VALUES;", old, values, count)
    assert out.tobytes() == expected.tobytes()
    assert seen.tobytes() == found.tobytes()


def test_a_cache_policy_of_a_reduction_has_no_effect() -> None:
    old, values = numbers("f32", 8, 4), numbers("f32", 32, 4)
    plain, _ = run_vectors("red.global.add.v4.f32 [%out], VALUES;", old, values, 4)
    with_policy, _ = run_vectors("red.global.add.L2::cache_hint.v4.f32 [%out], VALUES, %policy;", old, values, 4)
    assert with_policy.tobytes() == plain.tobytes()


def test_a_vector_reduction_needs_the_alignment_of_the_vector() -> None:
    with pytest.raises(SimulationError, match="global atomic of 16 bytes") as caught:
        run_vectors("red.global.add.v4.f32 [%out+4], VALUES;", numbers("f32", 9, 4), numbers("f32", 32, 4), 4)
    assert caught.value.kind == "misaligned"


def test_sums_of_f32_flush_subnormals_in_global_memory_only() -> None:
    tiny = np.float32(1e-40)
    old, values = np.full((8, 2), tiny, np.float32), np.full((32, 2), tiny, np.float32)
    out, _ = run_vectors("red.global.add.v2.f32 [%out], VALUES;", old, values, 2)
    assert not out.any()
    shared = """{ .shared .b32 s; .reg .b32 %s; mov.u32 %s, s; st.shared.b32 [%s], %v0; bar.sync 0;
                  atom.shared.add.f32 %o0, [%s], %v0; bar.sync 0; ld.shared.b32 %o0, [%s]; }"""
    _, seen = run_vectors(shared, old, values, 2)
    np.testing.assert_allclose(seen[:, 0], 33 * tiny, rtol=1e-4)


def test_sums_of_f32_by_bulk_copies_keep_subnormals() -> None:
    """As on an H200."""
    flat = np.full(512, 1e-40, np.float32)
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%s], 2048;"
    assert (run_bulk(copy, flat, flat) == 2 * flat).all()
    box = flat.reshape(16, 32)
    copy = """mov.b32 %v0, 0;
              cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%map, {%v0, %v0}], [%s];"""
    assert (run_bulk(copy, box, box, box=(32, 16)) == 2 * box).all()


# Bulk copies ------------------------------------------------------------------------------------------------------


def bulk_kernel(copy: str, size: int) -> str:
    """Fills ``size`` bytes of shared memory, and lets thread 0 issue ``copy`` from there."""
    vector = "{%v0, %v1, %v2, %v3}"
    lines = [
        ".visible .entry k(.param .u64 out, .param .u64 values, .param .align 64 .b8 map[128]) {",
        f".shared .align 1024 .b8 memory[{size}];",
        ".reg .b64 %out, %in, %map; .reg .b32 %t, %s, %place, %v<4>; .reg .pred %first;",
        "ld.param.u64 %out, [out]; ld.param.u64 %in, [values]; mov.b64 %map, map; cvta.param.u64 %map, %map;",
        "mov.u32 %t, %tid.x; mov.u32 %s, memory; mad.wide.u32 %in, %t, 16, %in; mad.lo.u32 %place, %t, 16, %s;",
        *(
            f"ld.global.v4.b32 {vector}, [%in+{at}]; st.shared.v4.b32 [%place+{at}], {vector};"
            for at in range(0, size, 512)
        ),
        "fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %first, %t, 0; @!%first bra DONE;",
        copy,
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        "DONE: ret; }",
    ]
    return HEADER_90A + "\n".join(lines)


def run_bulk(
    copy: str, old: np.ndarray, values: np.ndarray, grid: int = 1, gpu: Any = None, **options: Any
) -> np.ndarray:
    gpu = gpu or SimulatedGPU("sm_90a")
    out = gpu.to_device(old)
    tensor_map: Any = bytes(128)
    if options:
        tensor_map = TensorMap(out, old.dtype, old.shape[::-1], old.strides[:-1], **options)
    module = gpu.load(bulk_kernel(copy, values.nbytes))
    module.launch("k", grid, 32, 0, [out, gpu.to_device(values), tensor_map])
    return gpu.to_host(out)


BULK = [
        ("add", "f32"), ("add", "f64"), ("add.noftz", "f16"), ("add.noftz", "bf16"), ("add", "u32"), ("add", "s32"),
        ("add", "u64"), ("min", "s32"), ("max", "u64"), ("min", "f16"), ("max", "bf16"), ("min", "s64"), ("inc", "u32"),
        ("dec", "u32"), ("and", "b32"), ("or", "b64"), ("xor", "b32"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "name"), BULK)
def test_reducing_bulk_copies_combine_with_global_memory(operation: str, name: str) -> None:
    count = 1024 // DTYPES[name].itemsize
    old, values = numbers(name, count), numbers(name, count)[::-1].copy()
    copy = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{name} [%out], [%s], 1024;"
    expected = combined(operation.split(".")[0], old, values)
    assert run_bulk(copy, old, values).tobytes() == expected.tobytes()


def test_blocks_add_their_parts_to_one_sum() -> None:
    """What a backward kernel does with dQ."""
    old, values = np.zeros(512, np.float32), numbers("f32", 512)
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%s], 2048;"
    np.testing.assert_allclose(run_bulk(copy, old, values, grid=5), 5 * values, rtol=1e-6)


@pytest.mark.parametrize("name", ["f32", "bf16", "s32"])
def test_reducing_tensor_copies_add_the_box_inside_the_tensor(name: str) -> None:
    itemsize = DTYPES[name].itemsize
    columns = 128 // itemsize
    old, values = numbers(name, 24, columns), numbers(name, 16, columns)
    order = np.arange(16 * columns).reshape(-1, 16 // itemsize)  # chunks of 16 bytes, as the swizzle permutes them
    order = order[Swizzle.B128.apply(16 * np.arange(len(order))) // 16].ravel()
    copy = """mov.b32 %v0, 0; mov.b32 %v1, 16;
              cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%map, {%v0, %v1}], [%s];"""
    out = run_bulk(copy, old, values, box=(columns, 16), swizzle=Swizzle.B128)
    assert out[:16].tobytes() == old[:16].tobytes()
    added = values.ravel()[order].reshape(values.shape)[:8]  # eight of the sixteen rows are beyond the tensor
    assert out[16:].tobytes() == combined("add", old[16:], added).tobytes()


def test_a_reducing_copy_reads_shared_memory_until_it_was_waited_for() -> None:
    copy = """cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%s], 512;
              cp.async.bulk.commit_group; st.shared.b32 [%s], %t;"""
    with pytest.raises(SimulationError, match="bulk store that was not waited for") as caught:
        run_bulk(copy, np.zeros(128, np.float32), numbers("f32", 128))
    assert caught.value.kind == "race"


def test_a_reducing_copy_needs_a_proxy_fence_after_ordinary_stores() -> None:
    gpu = SimulatedGPU("sm_90a")
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%s], 512;"
    module = gpu.load(bulk_kernel(copy, 512).replace("fence.proxy.async.shared::cta;", ""))
    values = gpu.to_device(numbers("f32", 128))
    with pytest.raises(SimulationError) as caught:
        module.launch("k", 1, 32, 0, [values, values, bytes(128)])
    assert caught.value.kind == "proxy-fence"


@pytest.mark.parametrize("kind", ["bulk", "bulk.tensor", "red"])
def test_a_reduction_into_memory_that_nobody_wrote_is_a_hazard(kind: str) -> None:
    copies = {
        "bulk": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%s], 2048;",
        "bulk.tensor": """mov.b32 %v0, 0;
            cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%map, {%v0, %v0}], [%s];""",
        "red": "red.global.add.v4.f32 [%out], {%v0, %v1, %v2, %v3};",
    }
    gpu = SimulatedGPU("sm_90a")
    out = gpu.allocate(2048)
    tensor_map = TensorMap(out, np.dtype(np.float32), (32, 16), (128,), (32, 16))
    values = gpu.to_device(numbers("f32", 512))
    module = gpu.load(bulk_kernel(copies[kind], 2048))
    with pytest.raises(SimulationError) as caught:
        module.launch("k", 1, 32, 0, [out, values, tensor_map])
    assert caught.value.kind == "uninitialised-global"


def test_a_reduction_that_no_type_has_is_refused_in_words() -> None:
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.f32 [%out], [%s], 512;"
    with pytest.raises(SimulationError, match=r"\.xor of \.f32; of floating-point types there are add, min, max"):
        run_bulk(copy, numbers("f32", 128), numbers("f32", 128))
