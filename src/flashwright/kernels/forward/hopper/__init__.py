"""The Hopper family of forward kernels: TMA, `wgmma`, mbarriers, warp specialisation; sm_90a."""

from flashwright.kernels.family import KernelFamily
from flashwright.kernels.forward.hopper.config import D_HEADS, HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.defaults import hopper_default, suits_hopper
from flashwright.kernels.forward.hopper.explain import EXPLANATION
from flashwright.kernels.forward.hopper.ladder import LADDER
from flashwright.kernels.forward.hopper.launch import RULES
from flashwright.kernels.forward.hopper.names import parse_hopper_config
from flashwright.kernels.forward.hopper.shapes import HopperTileShapes
from flashwright.kernels.forward.hopper.source import hopper_kernel_source
from flashwright.kernels.forward.hopper.space import SPACE, hopper_rejection_reason
from flashwright.kernels.forward.launch import FORWARD

HOPPER_FORWARD = KernelFamily(
    operation=FORWARD,
    name="hopper",
    title="Hopper",
    config_type=HopperForwardKernelConfig,
    d_heads=D_HEADS,
    parse=parse_hopper_config,
    shapes=HopperTileShapes,
    source=hopper_kernel_source,
    rejection_reason=hopper_rejection_reason,
    default_config=hopper_default,
    launch_rules=RULES,
    suits=suits_hopper,
    oldest_arch="sm_90a",
    runs_on_later=False,
    space=SPACE,
    ladder=LADDER,
    explanation=EXPLANATION,
)
