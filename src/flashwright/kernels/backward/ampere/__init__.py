"""The Ampere family of backward kernels: `mma.sync`, `ldmatrix`, `cp.async`; every GPU from sm_80 on."""

from flashwright.kernels.backward.ampere.config import COUNTS, OPTIONS, AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.defaults import ampere_backward_default
from flashwright.kernels.backward.ampere.explain import EXPLANATION
from flashwright.kernels.backward.ampere.ladder import LADDER
from flashwright.kernels.backward.ampere.launch import RULES
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.backward.ampere.source import ampere_backward_source, ampere_dq_source, ampere_rows_source
from flashwright.kernels.backward.ampere.space import SPACE, ampere_backward_rejection_reason
from flashwright.kernels.backward.launch import BACKWARD, DQ, ROWS
from flashwright.kernels.backward.rows import ROW_KERNEL_THREADS
from flashwright.kernels.family import Companion, KernelFamily
from flashwright.kernels.short_forms import config_parser

AMPERE_BACKWARD = KernelFamily(
    operation=BACKWARD,
    name="ampere",
    title="Ampere",
    config_type=AmpereBackwardKernelConfig,
    d_heads=(32, 64, 96, 128, 192, 256),
    parse=config_parser(
        AmpereBackwardKernelConfig,
        "ampere backward",
        r"stages_(\d+)_(\d+)",
        OPTIONS,
        "ampere backward (BF16, 128, 64, 128, 8): stages_2_1+parts_2+swizzled",
        COUNTS,
    ),
    shapes=AmpereBackwardShapes,
    source=ampere_backward_source,
    rejection_reason=ampere_backward_rejection_reason,
    default_config=ampere_backward_default,
    launch_rules=RULES,
    space=SPACE,
    explanation=EXPLANATION,
    ladder=LADDER,
    companions={
        ROWS: Companion(ampere_rows_source, ROW_KERNEL_THREADS),
        DQ: Companion(ampere_dq_source, ROW_KERNEL_THREADS),
    },
)
