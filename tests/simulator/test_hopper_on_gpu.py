"""The simulator and a Hopper GPU agree bit for bit on wgmma's layouts, and on where bulk copies put their boxes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from flashwright.hardware.tensor_map import Fill, Swizzle, TensorMap
from flashwright.runtime.tensor_maps import encoded_words
from flashwright.simulator.gpu import SimulatedGPU

from .bulk_copies import CASES, run_copy
from .hopper_tools import BF16, compile_hopper, descriptor, fragments_of, run_cluster_descriptors, run_wgmma, wgmma_ptx
from .test_hopper_wgmma import IMAGE_BYTES, LAYOUTS, k_major, mn_major, operands

pytestmark = pytest.mark.gpu


class RealGPU:
    """As much of `SimulatedGPU` as these tests use, on the GPU of this machine."""

    def __init__(self) -> None:
        import torch

        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU (compute capability 9.0)")
        torch.zeros(1, device="cuda")  # the driver's functions need a context
        self._torch = torch
        self._arrays: dict[int, tuple[Any, np.ndarray]] = {}
        self.kernels = ["k"]

    def to_device(self, array: np.ndarray) -> int:
        tensor = self._torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).cuda()
        self._arrays[tensor.data_ptr()] = (tensor, array)
        return int(tensor.data_ptr())

    def to_host(self, address: int) -> np.ndarray:
        tensor, array = self._arrays[address]
        return tensor.cpu().numpy().view(array.dtype).reshape(array.shape)

    def load(self, ptx: str) -> RealGPU:
        from cuda.bindings import driver

        self._module = _checked(driver.cuModuleLoadData(ptx.encode() + b"\0"))
        return self

    def launch(self, kernel: str, grid: int, block: int, shared_bytes: int, args: list[Any]) -> None:
        from cuda.bindings import driver

        function = _checked(driver.cuModuleGetFunction(self._module, kernel.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        packed = [
            encoded_words(item).tobytes() if isinstance(item, TensorMap)
            else item.to_bytes(8, "little") if isinstance(item, int)
            else item if isinstance(item, bytes)
            else item.tobytes()
            for item in args
        ]  # fmt: skip
        buffers = [ctypes.create_string_buffer(data, len(data)) for data in packed]
        parameters = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        stream = self._torch.cuda.current_stream().cuda_stream
        shape = (grid, 1, 1, block, 1, 1)
        _checked(driver.cuLaunchKernel(function, *shape, shared_bytes, stream, ctypes.addressof(parameters), 0))
        self._torch.cuda.synchronize()


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    assert not int(status), status
    return values[0] if values else None


def on_both(run: Any) -> tuple[np.ndarray, np.ndarray]:
    return run(RealGPU()), run(SimulatedGPU("sm_90a"))


@pytest.mark.parametrize("columns", [8, 24, 64, 104, 128, 176, 256])
def test_accumulators_are_laid_out_alike(columns: int) -> None:
    a, b = operands(columns)
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_b = k_major(image, b, 0, Swizzle.B32)
    ptx = wgmma_ptx(columns, "bf16", image.nbytes, a_in_registers=True, options="p, 1, 1, 0", scale_d=1)
    real, simulated = on_both(lambda gpu: run_wgmma(ptx, image, columns, 0, desc_b, fragments_of(a), gpu))
    np.testing.assert_array_equal(real, simulated)


@pytest.mark.parametrize("swizzle", LAYOUTS)
@pytest.mark.parametrize("a_is_mn_major", [False, True])
@pytest.mark.parametrize("b_is_mn_major", [False, True])
def test_descriptors_are_read_alike(swizzle: Swizzle, a_is_mn_major: bool, b_is_mn_major: bool) -> None:
    a, b = operands(128, np.dtype(np.float16))
    image = np.zeros(IMAGE_BYTES // 2, np.uint16)
    desc_a = (mn_major if a_is_mn_major else k_major)(image, a, 0, swizzle)
    desc_b = (mn_major if b_is_mn_major else k_major)(image, b, 16 * 1024, swizzle)
    ptx = wgmma_ptx(128, "f16", IMAGE_BYTES, options=f"p, 1, 1, {int(a_is_mn_major)}, {int(b_is_mn_major)}")
    real, simulated = on_both(lambda gpu: run_wgmma(ptx, image, 128, desc_a, desc_b, gpu=gpu))
    np.testing.assert_array_equal(real, simulated)


def test_base_offsets_are_read_alike() -> None:
    a, _ = operands(8)
    rng = np.random.default_rng(0)
    image = rng.integers(-8, 9, IMAGE_BYTES // 2).astype(BF16).view(np.uint16)
    desc_a = k_major(image, a, 0)
    ptx = wgmma_ptx(8, "bf16", IMAGE_BYTES)
    desc_b = descriptor(16384 + 256, 16, 1024, Swizzle.B128, base_offset=2)
    real, simulated = on_both(lambda gpu: run_wgmma(ptx, image, 8, desc_a, desc_b, gpu=gpu))
    np.testing.assert_array_equal(real, simulated)


def test_addresses_in_clusters_have_the_same_ranks() -> None:
    source = r"""extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32 *out) {
      __shared__ u32 s[2]; extern __shared__ u32 more[];
      u32 own, other, rank, of_offset; u64 generic;
      asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(own));
      if (threadIdx.x == 0) s[0] = 100 + own;
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(addr(s)), "r"(own ^ 1));
      asm volatile("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"((u64)s), "r"(own ^ 1));
      asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(rank) : "r"(addr(s)));
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(of_offset) : "r"(addr(s) & 0xffffff) : "memory");
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
      u32 found[] = {addr(s) >> 24, addr(more) >> 24, other >> 24, (u32)generic >> 24, rank, of_offset};
      if (threadIdx.x == 0) for (int i = 0; i < 6; ++i) out[6 * blockIdx.x + i] = found[i]; }"""
    ptx = compile_hopper(source)

    def run(gpu: Any) -> np.ndarray:
        out = gpu.to_device(np.zeros((4, 6), np.uint32))
        gpu.load(ptx).launch("k", 4, 32, 64, [out])
        return gpu.to_host(out)

    real, simulated = on_both(run)
    np.testing.assert_array_equal(real, simulated)


@pytest.mark.parametrize("mask", [0x3FFFF, 0xFFFFFFFF])
def test_descriptors_of_addresses_in_clusters_are_read_alike(mask: int) -> None:
    image = np.random.default_rng(0).integers(-4, 5, 2048).astype(BF16).view(np.uint16)
    real, simulated = on_both(lambda gpu: run_cluster_descriptors(image, mask, gpu))
    np.testing.assert_array_equal(real, simulated)


@pytest.mark.parametrize(("shape", "start", "box"), CASES)
def test_boxes_are_copied_alike(shape: tuple[int, ...], start: tuple[int, ...], box: tuple[int, ...]) -> None:
    array = (1 + np.arange(np.prod(shape)) % 31).astype(BF16).reshape(shape)
    real, simulated = (run_copy(array, start, box, stores=min(start) >= 0, gpu=gpu) for gpu in (RealGPU(), None))  # type: ignore[arg-type]
    np.testing.assert_array_equal(real[0], simulated[0])
    np.testing.assert_array_equal(real[1], simulated[1])


@pytest.mark.parametrize("swizzle", [Swizzle.B128, Swizzle.B64, Swizzle.B32])
@pytest.mark.parametrize("offset", [0, 128])
def test_boxes_are_swizzled_alike(swizzle: Swizzle, offset: int) -> None:
    """A box as wide as the swizzle span, at the start of a pattern or 128 bytes after it."""
    width = swizzle.value // 2
    array = np.arange(32 * width, dtype=np.uint16).reshape(32, width).view(np.float16)
    change = ("#define OFFSET 0", f"#define OFFSET {offset}")
    real, simulated = (
        run_copy(array, (0, 4), (width, 24), gpu=gpu, change=change, swizzle=swizzle)[0]  # type: ignore[arg-type]
        for gpu in (RealGPU(), None)
    )
    np.testing.assert_array_equal(real, simulated)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize("fill", Fill)
@pytest.mark.parametrize(("shape", "start", "box"), [case for case in CASES if min(case[1]) >= 0 and len(case[0]) < 4])
def test_what_is_outside_is_filled_alike(
    shape: tuple[int, ...], start: tuple[int, ...], box: tuple[int, ...], fill: Fill, dtype: np.dtype[Any]
) -> None:
    array = (1 + np.arange(np.prod(shape)) % 31).astype(dtype).reshape(shape)
    real, simulated = (run_copy(array, start, box, fill=fill, gpu=gpu)[0] for gpu in (RealGPU(), None))  # type: ignore[arg-type]
    # A NaN has many forms: that it is one is what counts.
    np.testing.assert_array_equal(real.view(dtype).astype(np.float32), simulated.view(dtype).astype(np.float32))


def test_boxes_that_reach_outside_have_nans_there() -> None:
    array = np.ones((4, 8), np.float16)
    values = run_copy(array, (0, 2), (8, 4), fill=Fill.NAN, gpu=RealGPU())[0].view(np.float16).reshape(4, 8)  # type: ignore[arg-type]
    assert (values[:2] == 1).all() and np.isnan(values[2:]).all()
