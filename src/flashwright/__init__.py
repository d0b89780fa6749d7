"""FlashAttention kernels you can read, configure, simulate, tune and use, with or without a GPU."""

from flashwright.attention import attention
from flashwright.compiler import CompileError, Kernel, compile_kernel, compile_many
from flashwright.families import parse_config
from flashwright.hopper.config import HopperForwardKernelConfig, parse_hopper_config
from flashwright.hopper.ladder import get_hopper_progression, get_hopper_progression_configs
from flashwright.hopper.shapes import HopperTileShapes
from flashwright.hopper.space import get_hopper_configs, hopper_rejection_reason
from flashwright.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flashwright.integrations.sdpa import scaled_dot_product_attention
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
from flashwright.variant import AttentionVariant, Window

__version__ = "0.1.0"

__all__ = [
    "AttentionVariant",
    "CompileError",
    "DType",
    "FlashForwardKernelConfig",
    "ForwardKernelTileShapes",
    "GPUError",
    "HopperForwardKernelConfig",
    "HopperTileShapes",
    "Kernel",
    "LadderRung",
    "Occupancy",
    "Window",
    "attention",
    "compile_kernel",
    "compile_many",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "get_autotuning_kernel_configs",
    "get_hopper_configs",
    "get_hopper_progression",
    "get_hopper_progression_configs",
    "get_kernel_progression",
    "get_kernel_progression_configs",
    "hopper_rejection_reason",
    "occupancy",
    "parse_config",
    "parse_hopper_config",
    "parse_kernel_name_into_config",
    "rejection_reason",
    "run_forward",
    "scaled_dot_product_attention",
    "should_autotune_config",
]
