"""The decode kernel of multi-head latent attention, whose values are columns of the keys: `wgmma`, mbarriers, warp
specialisation; sm_90a."""

from flashwright.kernels.decode.latent.config import D_HEADS, D_VALUE, LatentDecodeKernelConfig
from flashwright.kernels.decode.latent.defaults import (
    latent_decode_default,
    latent_decode_rejection_reason,
    suits_latent_decode,
)
from flashwright.kernels.decode.latent.explain import EXPLANATION
from flashwright.kernels.decode.latent.shapes import LatentDecodeShapes
from flashwright.kernels.decode.latent.source import latent_decode_source
from flashwright.kernels.decode.latent.space import SPACE
from flashwright.kernels.decode.launch import DECODE
from flashwright.kernels.family import KernelFamily
from flashwright.kernels.launch import LaunchRules
from flashwright.kernels.short_forms import config_parser

LATENT_DECODE = KernelFamily(
    operation=DECODE,
    name="latent",
    title="Latent",
    config_type=LatentDecodeKernelConfig,
    d_heads=D_HEADS,
    parse=config_parser(
        LatentDecodeKernelConfig,
        "latent decode",
        r"stages_(\d+)",
        {},
        "latent decode (BF16, 576, 64, 64): stages_2",
        sizes=3,
    ),
    shapes=LatentDecodeShapes,
    source=latent_decode_source,
    rejection_reason=latent_decode_rejection_reason,
    default_config=latent_decode_default,
    suits=suits_latent_decode,
    oldest_arch="sm_90a",
    runs_on_later=False,
    launch_rules=LaunchRules(values_in_keys=D_VALUE),
    space=SPACE,
    explanation=EXPLANATION,
)
