"""The kernel that merges a partial result into fp32 sums: one pass over both."""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.source import KernelSource, device_headers
from flashwright.problem.dtypes import DType
from flashwright.problem.variant import PLAIN
from flashwright.runtime.devices import gpu_model, make_context_current
from flashwright.runtime.loaded import LoadedKernel
from flashwright.runtime.parameters import Parameters
from flashwright.runtime.tensors import in_vectors

if TYPE_CHECKING:
    import torch

THREADS = 256
"""`merge_threads` of merge.cuh."""
VECTOR_COLUMNS = 8


def merge_source(dtype: DType) -> KernelSource:
    members = ", ".join(f"{member.name} = {member.value}" for member in DType)
    text = f'enum class DType {{ {members} }};\n#include "forward/merge.cuh"\n'
    return KernelSource(text, device_headers(), f"merge_parts<{dtype.to_cpp()}>", "merge_parts.cu")


def merge_grid(batch: int, heads: int, rows: int, columns: int) -> tuple[int, int, int]:
    block_rows = THREADS // (columns // VECTOR_COLUMNS)
    return -(-rows // block_rows), heads, batch


def merges_on_gpu(sums: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether the kernel merges such tensors."""
    import torch

    return (
        part.is_cuda
        and sums.dtype == torch.float32
        and part.dtype in (torch.float16, torch.bfloat16)
        and in_vectors(part)
        and part.data_ptr() % 16 == 0
    )


def merge_on_gpu(sums: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Mixes `part` into `sums`, (batch, heads, rows, columns), and `part_lse` into `lse`, (batch, heads, rows), whose
    rows are contiguous. Queued on the current stream."""
    import torch

    part_lse = part_lse.contiguous()
    batch, heads, rows, columns = part.shape
    words = array(
        "Q",
        [
            sums.data_ptr(), *sums.stride()[:3], lse.data_ptr(), *lse.stride()[:2], part.data_ptr(),
            *part.stride()[:3], part_lse.data_ptr(), rows, columns,
        ],
    )  # fmt: skip
    index = part.device.index
    parameters = Parameters(words, range(len(words)))
    kernel = _loaded(DType.parse(str(part.dtype)), index)
    with torch.cuda.device(index):
        stream = torch._C._cuda_getCurrentRawStream(index)
        kernel.launch(merge_grid(batch, heads, rows, columns), parameters.address, stream)


@lru_cache(maxsize=64)
def _loaded(dtype: DType, device_index: int) -> LoadedKernel:
    import torch

    source = merge_source(dtype)
    program = compile_source(source, gpu_model(device_index).arch)
    kernel: Kernel[Any] = Kernel("merge_parts", PLAIN, program, 0, THREADS, source.flattened())
    with torch.cuda.device(device_index):
        make_context_current(device_index)
        return LoadedKernel(kernel, device_index)
