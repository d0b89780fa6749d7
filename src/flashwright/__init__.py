"""FlashAttention kernels you can read, configure, simulate, tune and use, with or without a GPU."""

from flashwright.interruption import end_quietly_if_command

end_quietly_if_command()  # before the imports that take long

from flashwright.attention import attention, choice, warm_up
from flashwright.compiler.kernel import Kernel
from flashwright.compiler.nvrtc import CompileError
from flashwright.compiler.occupancy import Occupancy, occupancy
from flashwright.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashwright.integrations.kv_cache import flash_attn_with_kvcache
from flashwright.integrations.sdpa import scaled_dot_product_attention
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.ladder import get_kernel_progression, get_kernel_progression_configs
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes, GemmShape
from flashwright.kernels.forward.ampere.space import get_autotuning_kernel_configs
from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.ladder import get_hopper_progression, get_hopper_progression_configs
from flashwright.kernels.forward.hopper.names import parse_hopper_config
from flashwright.kernels.forward.hopper.shapes import HopperTileShapes
from flashwright.kernels.forward.hopper.space import get_hopper_configs, hopper_rejection_reason
from flashwright.kernels.ladder import LadderRung
from flashwright.kernels.registry import parse_config, rejection_reason, should_autotune_config, tile_shapes
from flashwright.operators.chosen import KernelChoice
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import random_inputs
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import Window
from flashwright.runtime.compiling import compile_kernel, compile_many
from flashwright.runtime.devices import GPUError
from flashwright.runtime.forward import run_forward
from flashwright.runtime.simulated import simulate_forward
from flashwright.simulation import simulate_kernel
from flashwright.version import __version__

__all__ = [
    "AttentionOptions",
    "AttentionVariant",
    "CompileError",
    "DType",
    "FlashForwardKernelConfig",
    "ForwardKernelTileShapes",
    "GPUError",
    "GemmShape",
    "HopperForwardKernelConfig",
    "HopperTileShapes",
    "Kernel",
    "KernelChoice",
    "LadderRung",
    "Occupancy",
    "Window",
    "__version__",
    "attention",
    "choice",
    "compile_kernel",
    "compile_many",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
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
    "random_inputs",
    "rejection_reason",
    "run_forward",
    "scaled_dot_product_attention",
    "should_autotune_config",
    "simulate_forward",
    "simulate_kernel",
    "tile_shapes",
    "warm_up",
]
