"""The Hopper family of backward kernels: TMA, `wgmma`, mbarriers, warp specialisation; sm_90a."""

from flashwright.kernels.backward.hopper.config import D_HEADS, OPTIONS, HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.defaults import hopper_backward_default
from flashwright.kernels.backward.hopper.explain import EXPLANATION
from flashwright.kernels.backward.hopper.ladder import LADDER
from flashwright.kernels.backward.hopper.launch import RULES
from flashwright.kernels.backward.hopper.shapes import HopperBackwardShapes
from flashwright.kernels.backward.hopper.source import hopper_backward_source, hopper_dq_source, hopper_rows_source
from flashwright.kernels.backward.hopper.space import SPACE, hopper_backward_rejection_reason
from flashwright.kernels.backward.launch import BACKWARD, DQ, ROWS
from flashwright.kernels.backward.rows import ROW_KERNEL_THREADS
from flashwright.kernels.family import Companion, KernelFamily
from flashwright.kernels.short_forms import config_parser

HOPPER_BACKWARD = KernelFamily(
    operation=BACKWARD,
    name="hopper",
    title="Hopper",
    config_type=HopperBackwardKernelConfig,
    d_heads=D_HEADS,
    parse=config_parser(
        HopperBackwardKernelConfig,
        "hopper backward",
        r"stages_(\d+)_(\d+)",
        OPTIONS,
        "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P",
    ),
    shapes=HopperBackwardShapes,
    source=hopper_backward_source,
    rejection_reason=hopper_backward_rejection_reason,
    default_config=hopper_backward_default,
    launch_rules=RULES,
    space=SPACE,
    explanation=EXPLANATION,
    ladder=LADDER,
    oldest_arch="sm_90a",
    runs_on_later=False,
    companions={
        ROWS: Companion(hopper_rows_source, ROW_KERNEL_THREADS),
        DQ: Companion(hopper_dq_source, ROW_KERNEL_THREADS),
    },
)
