"""FlashAttention kernels you can read, configure, simulate, tune and use, with or without a GPU."""

from flashwright.compiler import CompileError, Kernel, compile_kernel, compile_many
from flashwright.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    LadderRung,
    get_autotuning_kernel_configs,
    get_kernel_progression,
    get_kernel_progression_configs,
    parse_kernel_name_into_config,
    rejection_reason,
    should_autotune_config,
)
from flashwright.occupancy import Occupancy, occupancy
from flashwright.runtime import GPUError, run_forward
from flashwright.tile_shapes import ForwardKernelTileShapes
from flashwright.variant import AttentionVariant

__version__ = "0.1.0"

__all__ = [
    "AttentionVariant",
    "CompileError",
    "DType",
    "FlashForwardKernelConfig",
    "ForwardKernelTileShapes",
    "GPUError",
    "Kernel",
    "LadderRung",
    "Occupancy",
    "compile_kernel",
    "compile_many",
    "get_autotuning_kernel_configs",
    "get_kernel_progression",
    "get_kernel_progression_configs",
    "occupancy",
    "parse_kernel_name_into_config",
    "rejection_reason",
    "run_forward",
    "should_autotune_config",
]
