"""The Ampere family of forward kernels: `mma.sync`, `ldmatrix`, `cp.async`; every GPU from sm_80 on."""

from flashwright.kernels.family import KernelFamily
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.defaults import ampere_default
from flashwright.kernels.forward.ampere.explain import EXPLANATION
from flashwright.kernels.forward.ampere.filter import OLDEST_ARCH, ampere_rejection_reason
from flashwright.kernels.forward.ampere.ladder import LADDER
from flashwright.kernels.forward.ampere.launch import RULES
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.kernels.forward.ampere.source import forward_kernel_source
from flashwright.kernels.forward.ampere.space import SPACE
from flashwright.kernels.forward.launch import FORWARD

AMPERE_FORWARD = KernelFamily(
    operation=FORWARD,
    name="ampere",
    title="Ampere",
    config_type=FlashForwardKernelConfig,
    d_heads=(32, 64, 96, 128, 160, 192, 256),
    parse=parse_kernel_name_into_config,
    shapes=ForwardKernelTileShapes,
    source=forward_kernel_source,
    rejection_reason=ampere_rejection_reason,
    default_config=ampere_default,
    launch_rules=RULES,
    oldest_arch=OLDEST_ARCH,
    space=SPACE,
    ladder=LADDER,
    explanation=EXPLANATION,
)
