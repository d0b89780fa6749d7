"""Which config computes a problem when nobody chose one."""

from __future__ import annotations

from flashwright.kernel_configs import DType, FlashForwardKernelConfig, parse_kernel_name_into_config

NATIVE_D_HEADS = (32, 64, 96, 128, 160, 192, 256)
"""Head dimensions with a kernel of their own; others are padded up to the next inside the kernel."""

_FEW_ROWS = 64
"""Up to this many query rows, a block of 128 rows would be half empty."""

_LONG = {
    32: "128, 128, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum",
    64: "128, 128, 4): async+eager+swizzled+load_4_4_2_tiles+opt_softmax+mma_sum",
    96: "128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+mma_sum",
    128: "128, 64, 4): async+eager+swizzled+load_2_2_0_tiles+buffer+opt_softmax+mma_sum",
    160: "64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax+mma_sum",
    192: "64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
    256: "64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
}
_SHORT = _LONG | dict.fromkeys(
    (32, 64, 96, 128), "64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+mma_sum"
)


def native_d_head(head_dim: int) -> int:
    """The smallest head dimension with a kernel of its own that holds `head_dim` columns."""
    for d_head in NATIVE_D_HEADS:
        if head_dim <= d_head:
            return d_head
    raise ValueError(f"head_dim: {head_dim} is not allowed; allowed: multiples of 8 up to {NATIVE_D_HEADS[-1]}")


def default_config(
    dtype: DType, head_dim: int, *, causal: bool, q_length: int, kv_length: int, gpu: str | None
) -> FlashForwardKernelConfig:
    """A config that is good on every GPU for a problem; chosen on an H200."""
    d_head = native_d_head(head_dim)
    table = _SHORT if q_length <= _FEW_ROWS else _LONG
    return _CONFIGS[dtype, d_head, table is _SHORT]


_CONFIGS = {
    (dtype, d_head, table is _SHORT): parse_kernel_name_into_config(f"({dtype.name}, {d_head}, {blocks}")
    for dtype in DType
    for table in (_SHORT, _LONG)
    for d_head, blocks in table.items()
}
