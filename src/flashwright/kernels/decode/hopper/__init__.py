"""The Hopper family of decode kernels: `wgmma`, mbarriers, warp specialisation; tiles of many packed rows; sm_90a."""

from flashwright.kernels.decode.append import APPEND, APPEND_THREADS
from flashwright.kernels.decode.hopper.config import D_HEADS, HopperDecodeKernelConfig
from flashwright.kernels.decode.hopper.defaults import (
    hopper_decode_default,
    hopper_decode_rejection_reason,
    suits_hopper_decode,
)
from flashwright.kernels.decode.hopper.explain import EXPLANATION
from flashwright.kernels.decode.hopper.ladder import LADDER
from flashwright.kernels.decode.hopper.shapes import HopperDecodeShapes
from flashwright.kernels.decode.hopper.source import hopper_append_source, hopper_decode_source
from flashwright.kernels.decode.hopper.space import SPACE
from flashwright.kernels.decode.launch import DECODE
from flashwright.kernels.family import Companion, KernelFamily
from flashwright.kernels.short_forms import config_parser

HOPPER_DECODE = KernelFamily(
    operation=DECODE,
    name="hopper",
    title="Hopper",
    config_type=HopperDecodeKernelConfig,
    d_heads=D_HEADS,
    parse=config_parser(
        HopperDecodeKernelConfig,
        "hopper decode",
        r"stages_(\d+)",
        {},
        "hopper decode (BF16, 128, 128, 64): stages_5",
        sizes=3,
    ),
    shapes=HopperDecodeShapes,
    source=hopper_decode_source,
    rejection_reason=hopper_decode_rejection_reason,
    default_config=hopper_decode_default,
    suits=suits_hopper_decode,
    oldest_arch="sm_90a",
    runs_on_later=False,
    space=SPACE,
    ladder=LADDER,
    explanation=EXPLANATION,
    companions={APPEND: Companion(hopper_append_source, APPEND_THREADS, on_request=True)},
)
