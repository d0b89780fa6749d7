"""How a forward kernel computes: the configuration, its names, the autotuning filter, the space and the ladder.

A `FlashForwardKernelConfig` is a description. It can be written down whether or not a kernel can be built from
it (`tile_shapes` decides that) and whether or not it is worth timing (`rejection_reason` decides that).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import IntEnum
from functools import cache
from itertools import product
from operator import attrgetter
from typing import Any, Generic, TypeVar

MAX_D_HEAD = 256
MAX_WARPS = 32

ConfigT = TypeVar("ConfigT")
"""A config of any kernel family."""


class DType(IntEnum):
    """Element type of Q, K, V and O. The numbers are PyTorch's `c10::ScalarType` codes."""

    FP16 = 5
    BF16 = 15

    @classmethod
    def parse(cls, value: DType | str | int) -> DType:
        """The dtype named by a member, its code, or a text such as `BF16`, `bfloat16` or `torch.float16`."""
        if isinstance(value, str):
            name = value.strip().lower().removeprefix("torch.")
            if name in _DTYPE_NAMES:
                return _DTYPE_NAMES[name]
        elif not isinstance(value, bool) and value in tuple(cls):
            return cls(value)
        raise ValueError(f"dtype: {value!r} is not a known element type; allowed: FP16, BF16")

    def to_cpp(self) -> str:
        return f"DType::{self.name}"


_DTYPE_NAMES = {
    "fp16": DType.FP16,
    "float16": DType.FP16,
    "half": DType.FP16,
    "bf16": DType.BF16,
    "bfloat16": DType.BF16,
}


def check_field_types(config: Any, types: Iterable[tuple[str, Any]]) -> None:
    """Raises `ValueError` for a field of another type; truth values may be given as 0 and 1."""
    for name, kind in types:
        value = getattr(config, name)
        if kind == "bool":
            if value not in (0, 1):
                raise ValueError(f"{name}: {value!r} is not a truth value; allowed: True, False")
            object.__setattr__(config, name, bool(value))
        elif kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}: {value!r} is not an integer")


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig:
    """The knobs of the Ampere-family forward kernel.

    The first thirteen fields are the seed system's. Those after them are later optimisations; their defaults
    are zero, so a thirteen-field form means the same kernel with or without them.
    """

    dtype: DType
    """Element type of Q, K, V, O; softmax and accumulation are always fp32."""
    d_head: int
    B_r: int
    """Rows of Q and O per thread block."""
    B_c: int
    """Rows of K and V per inner step."""
    n_warps: int
    async_copy: bool
    """Copy global→shared by `cp.async`, not through registers."""
    eager_load_blocks: bool
    """Start V's copy before S = QKᵀ and the next K's before softmax, not when the block is needed."""
    swizzled: bool
    """XOR-swizzle the shared-memory layout."""
    Q_mma_load_K_tiles: int
    """8-wide fragments of Q moved to registers at a time; 0: the whole block at once, kept there."""
    K_mma_load_K_tiles: int
    V_mma_load_K_tiles: int
    mma_double_buffer_loads: bool
    """Two register buffers: tile t+1 is loaded while tile t is multiplied."""
    optimized_softmax: bool
    """exp2 with the scale folded into one fused multiply-add per score."""
    peeled_first_step: bool = False
    """The first KV block runs outside the loop, without rescaling an empty O and row sum."""
    reversed_kv: bool = False
    """Visit KV blocks from the last to the first."""
    streaming_stores: bool = False
    """Store O with the evict-first cache policy, for nobody in the kernel reads it again."""
    static_row_stride: int = 0
    """Elements between consecutive rows of Q, K, V and O, known at compile time; 0: read at run time."""
    mma_row_sum: bool = False
    """Sum the exponentials on the tensor cores, as P times a column of ones, not by additions in fp32."""
    assembler_reorders: bool = False
    """Let the assembler schedule loads and products as it sees fit; otherwise it keeps the kernel's order."""
    two_kv_stages: bool = False
    """Two K and two V blocks in shared memory: both of the next step are copied while this one is computed."""
    lazy_rescale: bool = False
    """Rescale O only when a row's maximum has grown by more than 2^8 in the exponential."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, _FIELD_TYPES)
        self._check_values()
        # Configs are looked up on every call of a kernel; hashing all fields each time would cost more than that.
        object.__setattr__(self, "_hash", hash(self.values()))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def _check_values(self) -> None:
        self._require_multiple("d_head", of=16, at_most=MAX_D_HEAD)
        self._require_multiple("B_r", of=16)
        self._require_multiple("B_c", of=16)
        self._require_multiple("n_warps", of=1, at_most=MAX_WARPS)
        for name in ("Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is negative; allowed: 0 (whole block), or a power of two from 2"
                )
        stride = self.static_row_stride
        if stride < 0 or stride % 8 or 0 < stride < self.d_head:
            raise ValueError(
                f"static_row_stride: {stride} is not a row stride in elements; allowed: 0 (run time), or a "
                f"multiple of 8 (16 bytes) from d_head = {self.d_head}"
            )

    def _require_multiple(self, name: str, *, of: int, at_most: int | None = None) -> None:
        value = getattr(self, name)
        if value <= 0 or value % of or (at_most is not None and value > at_most):
            limit = f" up to {at_most}" if at_most is not None else ""
            raise ValueError(f"{name}: {value} is not allowed; allowed: positive multiples of {of}{limit}")

    def short_form(self) -> str:
        """One line that says everything, e.g. `(BF16, 128, 64, 64, 4): async+load_0_2_2_tiles+buffer`."""
        tiles = f"load_{self.Q_mma_load_K_tiles}_{self.K_mma_load_K_tiles}_{self.V_mma_load_K_tiles}_tiles"
        options = [token for token, name in _OPTIONS_BEFORE_TILES.items() if getattr(self, name)]
        options.append(tiles)
        options += [token for token, name in _OPTIONS_AFTER_TILES.items() if getattr(self, name)]
        if self.static_row_stride:
            options.append(f"stride_{self.static_row_stride}")
        head = f"({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}, {self.n_warps})"
        return f"{head}: {'+'.join(options)}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(_cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_kernel_name_into_config` reads it back."""
        return f"flash_forward_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return _field_values(self)


# Spaces are made of thousands of configs: what is the same for all of them is found out once.
_FIELD_TYPES = tuple((field.name, field.type) for field in fields(FlashForwardKernelConfig))
_field_values: Callable[[FlashForwardKernelConfig], tuple[Any, ...]] = attrgetter(*(name for name, _ in _FIELD_TYPES))

_OPTIONS_BEFORE_TILES = {"async": "async_copy", "eager": "eager_load_blocks", "swizzled": "swizzled"}
_OPTIONS_AFTER_TILES = {
    "buffer": "mma_double_buffer_loads",
    "opt_softmax": "optimized_softmax",
    "peeled": "peeled_first_step",
    "reversed": "reversed_kv",
    "streaming": "streaming_stores",
    "mma_sum": "mma_row_sum",
    "reorder": "assembler_reorders",
    "two_stages": "two_kv_stages",
    "lazy": "lazy_rescale",
}
_OPTION_FIELDS = _OPTIONS_BEFORE_TILES | _OPTIONS_AFTER_TILES
_FIELDS_NEVER_ZERO = 5

_SHORT_FORM = re.compile(r"\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)\s*:\s*(\S+)")
_CPP_STRUCT = re.compile(r"FlashForwardKernelConfig\s*\{([^{}]*)\}")
_CPP_CAST = re.compile(r"^\(\s*[\w:]+\s*\)\s*")
_CPP_SCOPE = re.compile(r"^(?:\w+::)+k?")


def _cpp_literal(value: DType | bool | int) -> str:
    if isinstance(value, DType):
        return value.to_cpp()
    return str(value).lower()


def parse_kernel_name_into_config(text: str) -> FlashForwardKernelConfig:
    """The config named by a short form, or by a C++ kernel name containing `FlashForwardKernelConfig{…}`."""
    if match := _CPP_STRUCT.search(text):
        return parse_cpp_fields(FlashForwardKernelConfig, match[1], _FIELDS_NEVER_ZERO)
    if match := _SHORT_FORM.fullmatch(text.strip()):
        dtype, *sizes, options = match.groups()
        d_head, B_r, B_c, n_warps = map(int, sizes)
        return FlashForwardKernelConfig(
            dtype=DType.parse(dtype), d_head=d_head, B_r=B_r, B_c=B_c, n_warps=n_warps, **_parse_options(options, text)
        )
    raise ValueError(
        f"{text!r} names no kernel; expected a short form such as "
        "'(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax' "
        f"or a C++ name containing 'FlashForwardKernelConfig{{…}}'{nearest_hint(text.strip(), _known_short_forms())}"
    )


def nearest_hint(text: str, known: Iterable[str]) -> str:
    """The end of an error message: what the writer probably meant, if anything is near enough."""
    nearest = get_close_matches(text, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


@cache
def _known_short_forms() -> list[str]:
    return [config.short_form() for config in (*get_kernel_progression_configs(), *get_autotuning_kernel_configs())]


def _parse_options(options: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(_OPTION_FIELDS.values(), False)
    seen: set[str] = set()
    for token in options.split("+"):
        kind = token
        if token in _OPTION_FIELDS:
            values[_OPTION_FIELDS[token]] = True
        elif match := re.fullmatch(r"load_(\d+)_(\d+)_(\d+)_tiles", token):
            kind = "load_…_tiles"
            for operand, tiles in zip("QKV", match.groups(), strict=True):
                values[f"{operand}_mma_load_K_tiles"] = int(tiles)
        elif match := re.fullmatch(r"stride_(\d+)", token):
            kind = "stride_…"
            values["static_row_stride"] = int(match[1])
        else:
            raise ValueError(
                f"unknown option {token!r} in {text!r}; allowed: {', '.join(_OPTION_FIELDS)}, "
                f"load_Q_K_V_tiles, stride_N{nearest_hint(token, (*_OPTION_FIELDS, 'load_2_2_2_tiles', 'stride_2048'))}"
            )
        if kind in seen:
            raise ValueError(f"option {kind!r} is given twice in {text!r}")
        seen.add(kind)
    if "load_…_tiles" not in seen:
        raise ValueError(f"{text!r} does not say how operands are loaded; expected an option load_Q_K_V_tiles")
    return values


def parse_cpp_fields(config_type: Callable[..., ConfigT], initialiser: str, never_zero: int) -> ConfigT:
    """The config that a C++ aggregate initialiser holds, by the order of the fields; the first `never_zero` of them
    are there in any name. A mangled name may leave out trailing members that are zero (Itanium C++ ABI, "template
    arguments")."""
    known = fields(config_type)  # type: ignore[arg-type]
    texts = [text.strip() for text in initialiser.split(",")]
    if not never_zero <= len(texts) <= len(known):
        raise ValueError(
            f"{config_type.__name__}{{{initialiser}}} has {len(texts)} fields; "
            f"expected {never_zero} to {len(known)}: {', '.join(field.name for field in known)}"
        )
    values = [_parse_cpp_literal(field.name, text) for field, text in zip(known, texts, strict=False)]
    return config_type(*values, *[0] * (len(known) - len(values)))


def _parse_cpp_literal(name: str, text: str) -> DType | bool | int:
    bare = _CPP_CAST.sub("", text)
    if name == "dtype":
        bare = _CPP_SCOPE.sub("", bare)
        return DType.parse(int(bare) if bare.isdigit() else bare)
    if bare in ("true", "false"):
        return bare == "true"
    if re.fullmatch(r"-?\d+", bare):
        return int(bare)
    raise ValueError(f"{name}: {text!r} is not a number or truth value")


# --- The filter ------------------------------------------------------------------------------------------------


def rejection_reason(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config is not worth timing: the rule it breaks, with its numbers; None if it is kept."""
    Q, K = cfg.Q_mma_load_K_tiles, cfg.K_mma_load_K_tiles
    if cfg.eager_load_blocks and not cfg.async_copy:
        return (
            "rule 1: eager_load_blocks is on and async_copy is off; "
            "starting a copy early hides its latency only if the copy is asynchronous"
        )
    if Q not in (0, K):
        return (
            f"rule 2: Q_mma_load_K_tiles = {Q} differs from K_mma_load_K_tiles = {K}; "
            "both are multiplied tile by tile, so a streamed Q must arrive in K's tiles"
        )
    if cfg.B_r == 64:
        if cfg.n_warps == 8:
            return "rule 3: B_r = 64 with n_warps = 8 leaves 8 rows per warp; an mma needs 16"
        if cfg.B_c == 32 and Q == 0:
            return (
                "rule 4: B_r = 64, B_c = 32 with Q_mma_load_K_tiles = 0; "
                "holding Q takes more registers than three resident blocks allow"
            )
        if cfg.B_c == 64 and Q != 0:
            return (
                f"rule 5: B_r = 64, B_c = 64 with Q_mma_load_K_tiles = {Q}; "
                "Q fits in registers at no cost in occupancy, so streaming it only adds loads"
            )
    if cfg.B_r == 128 and Q == 0:
        return "rule 6: B_r = 128 with Q_mma_load_K_tiles = 0; holding Q beside O and S exceeds the registers"
    return None


def should_autotune_config(cfg: FlashForwardKernelConfig) -> bool:
    """Whether the filter keeps a config."""
    return rejection_reason(cfg) is None


# --- The space -------------------------------------------------------------------------------------------------

AUTOTUNED_D_HEADS = (64, 128)
_BLOCK_SHAPES = tuple(product((64, 128), (32, 64, 128), (4, 8)))
_QK_LOAD_TILES = ((0, 0), (0, 2), (2, 2), (4, 4))
_V_LOAD_TILES = (0, 2)
# The later optimisations, in the combinations worth trying: each pays most on top of the one before.
_STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"mma_row_sum": True, "lazy_rescale": True},
    {"mma_row_sum": True, "lazy_rescale": True, "two_kv_stages": True},
)
_WIDE_STYLES: tuple[dict[str, Any], ...] = (*_STYLES, {"lazy_rescale": True})
"""Beyond 128 columns, registers are so scarce that a row sum's column of ones may cost more than it saves."""
_ACCUMULATORS_THAT_FIT = 240
"""fp32 accumulators of S and O per thread that leave registers for operands and addresses, of 255."""
_ACCUMULATORS_THAT_FIT_REORDERED = 160
"""The same when the assembler reorders, which keeps more values alive at once; with two stages, fewer."""


def get_autotuning_kernel_configs(
    dtype: DType | str | None = None, d_head: int | None = None
) -> list[FlashForwardKernelConfig]:
    """The search space: every config worth timing, of one or all dtypes and of one or both seed head dimensions."""
    dtypes = tuple(DType) if dtype is None else (DType.parse(dtype),)
    d_heads = AUTOTUNED_D_HEADS if d_head is None else (d_head,)
    return [config for some in product(dtypes, d_heads) for config in _worth_timing(*some)]


@cache
def _worth_timing(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    return tuple(config for config, reason in search_space(dtype, d_head) if reason is None)


def search_space(dtype: DType, d_head: int) -> Iterator[tuple[FlashForwardKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing ("rule: reason"), or None if it is."""
    styles = _WIDE_STYLES if _is_wide(d_head) else _STYLES
    knobs = product(_BLOCK_SHAPES, _QK_LOAD_TILES, _V_LOAD_TILES, (False, True), styles, (False, True))
    for (B_r, B_c, n_warps), (Q, K), V, buffer, style, reorder in knobs:
        config = FlashForwardKernelConfig(
            dtype, d_head, B_r, B_c, n_warps, True, True, True, Q, K, V, buffer, True,
            assembler_reorders=reorder, **style,
        )  # fmt: skip
        yield config, _rejection_in_space(config) or _redundancy_in_space(config)


def _is_wide(d_head: int) -> bool:
    """Whether heads are wider than any that the filter's rules were made for."""
    return d_head > max(AUTOTUNED_D_HEADS)


def _rejection_in_space(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config cannot be good: the filter's rules, and what does not fit."""
    reason = rejection_reason(cfg)
    # Rules 4 and 5 are about three resident blocks and about a Q that fits in registers beside them: a wide head's does
    # not, and of its blocks there are two at most.
    if reason is not None and not (reason.startswith(("rule 4", "rule 5")) and _is_wide(cfg.d_head)):
        return reason
    if (accumulators := _accumulators(cfg)) > _ACCUMULATORS_THAT_FIT:
        return f"registers: S and O take {accumulators} registers of a thread; {_ACCUMULATORS_THAT_FIT} leave room"
    Q, K, V = cfg.Q_mma_load_K_tiles, cfg.K_mma_load_K_tiles, cfg.V_mma_load_K_tiles
    columns = 16 if cfg.mma_double_buffer_loads else 8
    if max(Q, K) * columns > cfg.d_head or V * columns > cfg.B_c:
        return (
            f"load tiles: {Q}, {K}, {V} fragments of {columns} columns exceed d_head = {cfg.d_head} or B_c = {cfg.B_c}"
        )
    return None


def _redundancy_in_space(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config that may be good need not be timed: others stand for it."""
    K, V, buffer = cfg.K_mma_load_K_tiles, cfg.V_mma_load_K_tiles, cfg.mma_double_buffer_loads
    styled = cfg.lazy_rescale
    if buffer and K == V == 0:
        return "buffer: K and V are loaded as a whole; there is nothing to double-buffer"
    if styled and (K == 0 or (buffer and not _is_wide(cfg.d_head))):
        return "style: later optimisations are tried where loads are tiled and, up to d_head 128, not double-buffered"
    if cfg.assembler_reorders:
        one_way = styled and K == V == 2 and not buffer
        if not one_way:
            return "reorder: where the assembler orders loads, one way of writing them (2_2, unbuffered) stands for all"
        if cfg.B_r == 64 and cfg.d_head == 128:
            return "reorder: at 64 rows of 128 columns the assembler prefers one more resident block, and spills for it"
        if not cfg.two_kv_stages and _accumulators(cfg) > _ACCUMULATORS_THAT_FIT_REORDERED:
            return f"reorder: more than {_ACCUMULATORS_THAT_FIT_REORDERED} accumulators leave the assembler no room"
    return None


def _accumulators(cfg: FlashForwardKernelConfig) -> int:
    """fp32 registers of a thread that hold S and O."""
    return cfg.B_r // cfg.n_warps * (cfg.B_c + cfg.d_head) // 32


# --- The ladder ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LadderRung(Generic[ConfigT]):
    """One step from the plainest kernel to the fastest: a config, and what it changes in the one before."""

    number: int
    change: str
    config: ConfigT


def climbed(base: ConfigT, changes: Iterable[tuple[str, dict[str, Any]]]) -> list[LadderRung[ConfigT]]:
    """The rungs from a base on, each with some fields of the one before changed."""
    rungs, config = [], base
    for number, (change, values) in enumerate(changes, start=1):
        config = replace(config, **values)  # type: ignore[type-var]
        rungs.append(LadderRung(number, change, config))
    return rungs


def get_kernel_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[FlashForwardKernelConfig]]:
    """The ladder, each rung one idea above the last."""
    base = FlashForwardKernelConfig(DType.parse(dtype), d_head, 64, 64, 4, True, False, False, 0, 0, 0, False, False)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: asynchronous copies only", {}),
        ("swizzled shared memory", {"swizzled": True}),
        ("eager K/V loads", {"eager_load_blocks": True}),
        (
            "interleaved shared→register loads",
            {"Q_mma_load_K_tiles": 2, "K_mma_load_K_tiles": 2, "V_mma_load_K_tiles": 2},
        ),
        ("double-buffered shared→register loads", {"mma_double_buffer_loads": True}),
        ("optimised softmax", {"optimized_softmax": True}),
        ("autotuned blocks: 128 rows of Q", {"B_r": 128}),
        ("two K/V stages in shared memory", {"two_kv_stages": True}),
        ("lazy rescaling of O", {"lazy_rescale": True}),
        ("row sums on the tensor cores", {"mma_row_sum": True}),
        ("the assembler's order of instructions", {"assembler_reorders": True}),
    ]
    return climbed(base, changes)


def get_kernel_progression_configs(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[FlashForwardKernelConfig]:
    """The configs of the ladder, from the first rung to the last."""
    return [rung.config for rung in get_kernel_progression(dtype, d_head)]
