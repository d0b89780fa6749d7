"""The Ampere family of decode kernels: `mma.sync`, `ldmatrix`, `cp.async`; every GPU from sm_80 on."""

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.defaults import ampere_decode_default, ampere_decode_rejection_reason
from flashwright.kernels.decode.ampere.names import parse_ampere_decode_config
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.decode.ampere.source import ampere_append_source, ampere_decode_source
from flashwright.kernels.decode.append import APPEND, APPEND_THREADS
from flashwright.kernels.decode.launch import DECODE
from flashwright.kernels.family import Companion, KernelFamily

AMPERE_DECODE = KernelFamily(
    operation=DECODE,
    name="ampere",
    title="Ampere",
    config_type=AmpereDecodeKernelConfig,
    d_heads=(32, 64, 96, 128, 192, 256),
    parse=parse_ampere_decode_config,
    shapes=AmpereDecodeShapes,
    source=ampere_decode_source,
    rejection_reason=ampere_decode_rejection_reason,
    default_config=ampere_decode_default,
    companions={APPEND: Companion(ampere_append_source, APPEND_THREADS)},
)
