"""The Ampere family of decode kernels: `mma.sync`, `ldmatrix`, `cp.async`; every GPU from sm_80 on."""

from flashwright.kernels.decode.ampere.config import OPTIONS, AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.defaults import ampere_decode_default, ampere_decode_rejection_reason
from flashwright.kernels.decode.ampere.explain import EXPLANATION
from flashwright.kernels.decode.ampere.ladder import LADDER
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.decode.ampere.source import ampere_append_source, ampere_decode_source
from flashwright.kernels.decode.ampere.space import SPACE
from flashwright.kernels.decode.append import APPEND, APPEND_THREADS
from flashwright.kernels.decode.launch import DECODE
from flashwright.kernels.family import Companion, KernelFamily
from flashwright.kernels.launch import LaunchRules
from flashwright.kernels.short_forms import config_parser

AMPERE_DECODE = KernelFamily(
    operation=DECODE,
    name="ampere",
    title="Ampere",
    config_type=AmpereDecodeKernelConfig,
    d_heads=(32, 64, 96, 128, 192, 256),
    parse=config_parser(
        AmpereDecodeKernelConfig,
        "ampere decode",
        r"rows_(\d+)\+stages_(\d+)\+blocks_(\d+)",
        OPTIONS,
        "ampere decode (BF16, 128, 16, 16, 8): rows_1+stages_2+blocks_1+swizzled",
    ),
    shapes=AmpereDecodeShapes,
    source=ampere_decode_source,
    launch_rules=LaunchRules(deals_items=True),
    rejection_reason=ampere_decode_rejection_reason,
    default_config=ampere_decode_default,
    space=SPACE,
    ladder=LADDER,
    explanation=EXPLANATION,
    companions={APPEND: Companion(ampere_append_source, APPEND_THREADS, on_request=True)},
)
