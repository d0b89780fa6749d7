"""Data of the simulated GPU: existing buffers, variables of a module, memory that nobody wrote, PTX in every form."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flashwright.hardware.tensor_map import TensorMap
from flashwright.simulator import PtxSyntaxError, SimulatedGPU, SimulationError

from .hopper_tools import run_cuda
from .tools import compile_cuda

COPY = 'extern "C" __global__ void k(int *out, const int *in) { out[threadIdx.x] = in[threadIdx.x]; }'
CONSTANTS = """__constant__ float weights[4] = {1, 2, 3, 4};
__device__ int total;
extern "C" __global__ void k(float *out) {
    out[threadIdx.x] = weights[threadIdx.x % 4];
    if (threadIdx.x == 0) total += 5; }"""


def test_an_array_is_written_into_existing_memory() -> None:
    gpu = SimulatedGPU()
    buffer = gpu.allocate(32)
    gpu.write(buffer, np.arange(8, dtype=np.int32))
    assert gpu.to_host(buffer).tolist() == list(range(8))
    gpu.write(buffer + 8, np.array([70, 80], np.int32))
    assert gpu.to_host(buffer).tolist() == [0, 1, 70, 80, 4, 5, 6, 7]
    gpu.write(buffer, np.ones((4, 4), ml_dtypes.bfloat16))
    assert gpu.to_host(buffer).dtype == ml_dtypes.bfloat16 and gpu.to_host(buffer).shape == (4, 4)


def test_writing_outside_of_a_buffer_is_refused() -> None:
    gpu = SimulatedGPU()
    buffer = gpu.allocate(32)
    with pytest.raises(ValueError, match=r"36 bytes do not fit .* has 32 from there on"):
        gpu.write(buffer, np.zeros(9, np.int32))
    with pytest.raises(ValueError, match="has 4 from there on"):
        gpu.write(buffer + 28, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="in no live allocation"):
        gpu.write(buffer + 32, np.zeros(1, np.int32))
    gpu.free(buffer)
    with pytest.raises(ValueError, match="in no live allocation"):
        gpu.write(buffer, np.zeros(1, np.int32))


def test_variables_of_a_module_are_written_and_read() -> None:
    gpu = SimulatedGPU()
    module = gpu.load(compile_cuda(CONSTANTS))
    out = gpu.to_device(np.zeros(8, np.float32))
    assert module.variables == {"weights": 16, "total": 4}
    assert module.read("weights", np.float32).tolist() == [1, 2, 3, 4]
    module.write("weights", np.array([10, 20], np.float32), offset=4)
    module.write("total", np.int32(100))
    module.launch("k", 1, 8, 0, [out])
    assert gpu.to_host(out).tolist() == [1, 10, 20, 4] * 2
    assert module.read("total", np.int32).tolist() == [105]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", np.zeros(1), "no global or constant variable 'weight' in this module; it has: .*weights"),
        ("weights", np.zeros(3), "24 bytes at offset 0 do not fit variable 'weights' of 16 bytes"),
    ],
)
def test_a_variable_that_is_not_there_or_too_small_is_explained(name: str, value: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedGPU().load(compile_cuda(CONSTANTS)).write(name, value)


@pytest.mark.parametrize("given", ["text", "bytes", "terminated bytes", "path", "name of a file"])
def test_ptx_is_given_as_text_bytes_or_file(given: str, tmp_path: Path) -> None:
    text = compile_cuda(COPY)
    file = tmp_path / "copy.ptx"
    file.write_text(text)
    sources = {
        "text": text,
        "bytes": text.encode(),
        "terminated bytes": text.encode() + b"\0",
        "path": file,
        "name of a file": str(file),
    }
    assert SimulatedGPU().load(sources[given]).kernels == ["k"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x7fELF\x02\x01", r"is a cubin or an object file \(ELF\), not PTX text"),
        (b"\x50\xed\x55\xba\x01", "is a fat binary"),
        (b".version 8.5\0\0\x01", "is binary"),
        (b".version 8.5 \xff", "byte 13 is not UTF-8"),
    ],
)
def test_what_is_no_ptx_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_bytes(content)
    for source in (content, file):
        with pytest.raises(PtxSyntaxError, match=message):
            SimulatedGPU().load(source)


@pytest.mark.parametrize("number", ["8.", "align", "0f3f800000"])
def test_a_number_that_is_no_integer_is_named_with_its_line(number: str) -> None:
    text = (
        f".version 8.5\n.target sm_80\n.address_size 64\n.visible .entry k(.param .align {number} .b8 a[16]) {{ ret; }}"
    )
    with pytest.raises(PtxSyntaxError, match=f"PTX line 4: expected an integer, found '{number}'"):
        SimulatedGPU().load(text)


# Memory that nobody wrote --------------------------------------------------------------------------------


def copy(gpu: SimulatedGPU, out: int, source: int, threads: int = 16, **options: object) -> object:
    return gpu.load(compile_cuda(COPY)).launch("k", 1, threads, 0, [out, source], **options)


def test_a_read_of_global_memory_that_nobody_wrote_is_a_hazard() -> None:
    gpu = SimulatedGPU()
    out, source = gpu.allocate(64), gpu.allocate(64)
    with pytest.raises(SimulationError) as caught:
        copy(gpu, out, source)
    assert caught.value.kind == "uninitialised-global"
    assert caught.value.address == source and caught.value.lane == 0
    gpu.write(source, np.arange(12, dtype=np.int32))
    run = copy(gpu, out, source, check_hazards="collect")
    assert [(item.kind, item.count, item.error.lane) for item in run.findings] == [("uninitialised-global", 4, 12)]
    copy(gpu, out, source, threads=12)
    copy(gpu, out, source, check_hazards={"uninitialised-global": "ignore"})


def test_what_a_kernel_wrote_may_be_read_even_if_hazards_were_ignored() -> None:
    gpu = SimulatedGPU()
    first, second = gpu.allocate(64), gpu.allocate(64)
    copy(gpu, first, gpu.to_device(np.arange(16, dtype=np.int32)), check_hazards=False)
    copy(gpu, second, first)
    assert gpu.to_host(second).view(np.int32).tolist() == list(range(16))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_every_byte_counts_whatever_the_width_and_the_alignment(dtype: type) -> None:
    size = np.dtype(dtype).itemsize
    source = "__global__ void k(int *out, const unsigned char *in) { out[threadIdx.x] = in[threadIdx.x]; }"
    gpu = SimulatedGPU()
    module = gpu.load(compile_cuda(source))
    buffer, out = gpu.allocate(21), gpu.to_device(np.zeros(21, np.int32))
    gpu.write(buffer + 3, np.zeros(1, dtype))
    run = module.launch(module.kernels[0], 1, 21, 0, [out, buffer], check_hazards="collect")
    assert [finding.count for finding in run.findings] == [21 - size]


def test_atomics_read_what_they_change() -> None:
    gpu = SimulatedGPU()
    module = gpu.load(compile_cuda('extern "C" __global__ void k(int *p) { atomicAdd(p, 1); }'))
    with pytest.raises(SimulationError, match="uninitialised-global: global atomic of 4 bytes that nobody wrote"):
        module.launch("k", 1, 32, 0, [gpu.allocate(4)])


PARTIAL = """extern "C" __global__ void k(const int *in, unsigned bytes) {
    __shared__ __align__(16) int s[4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2; cp.async.wait_all;" ::
        "r"((unsigned)__cvta_generic_to_shared(s)), "l"(in), "r"(bytes) : "memory"); }"""


def test_a_copy_of_part_of_its_width_reads_that_part() -> None:
    gpu = SimulatedGPU()
    source = gpu.allocate(16)
    gpu.write(source, np.ones(2, np.int32))
    module = gpu.load(compile_cuda(PARTIAL))
    module.launch("k", 1, 1, 0, [source, np.uint32(8)])
    with pytest.raises(SimulationError, match="uninitialised-global"):
        module.launch("k", 1, 1, 0, [source, np.uint32(12)])


BULK = """
__global__ void kernel(const __grid_constant__ Map source, const __grid_constant__ Map target) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 full;
  if (threadIdx.x == 0) {
    init(addr(&full), 1); init_fence(); expect(addr(&full), 4096);
    load2(addr(shared), source, addr(&full), 0, 0); wait(addr(&full), 0);
    store2(addr(shared), target, 0, 0); bulk_commit(); bulk_wait_read(); } }
"""


def test_bulk_copies_read_and_write_memory_too() -> None:
    def tensor(address: int) -> TensorMap:
        return TensorMap(address, np.dtype(np.float32), (32, 32), (128,), (32, 32))

    gpu = SimulatedGPU("sm_90a")
    first, second, third = (gpu.allocate(4096) for _ in range(3))
    with pytest.raises(SimulationError, match="uninitialised-global: bulk copy of global memory that nobody wrote"):
        run_cuda(BULK, 32, [tensor(first), tensor(second)], gpu, shared_bytes=4096)
    gpu.write(first, np.arange(1024, dtype=np.float32))
    run_cuda(BULK, 32, [tensor(first), tensor(second)], gpu, shared_bytes=4096)
    run_cuda(BULK, 32, [tensor(second), tensor(third)], gpu, shared_bytes=4096)
    assert (gpu.to_host(third).view(np.float32) == np.arange(1024)).all()
