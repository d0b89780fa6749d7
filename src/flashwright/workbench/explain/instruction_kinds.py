"""What an instruction is for, in the words of this kernel: the same kinds for PTX and for machine code."""

from __future__ import annotations

import re
from enum import Enum


class Kind(Enum):
    """The order is that of a KV step, and of rows in tables and pictures."""

    COPY = "copy global → shared"
    WAIT = "commit and wait for copies"
    BARRIER = "barrier"
    VOTE = "barrier with a vote"
    LOAD = "load fragments (ldmatrix)"
    MMA = "matrix product (mma)"
    PRODUCT_WAIT = "commit and wait for products"
    EXPONENTIAL = "exponential (ex2)"
    FLOAT = "fp32 arithmetic"
    SHUFFLE = "exchange between lanes"
    CONVERT = "convert and pack"
    GLOBAL = "global memory"
    SHARED = "shared memory, other"
    LOCAL = "local memory (spills)"
    INTEGER = "integers and addresses"
    MOVE = "moves"
    CONTROL = "predicates and branches"
    OTHER = "other and padding"


def _rules(table: dict[Kind, str]) -> list[tuple[re.Pattern[str], Kind]]:
    return [(re.compile(pattern), kind) for kind, pattern in table.items()]


# Matched at the start of the opcode, first hit first.
_PTX_RULES = _rules(
    {
        Kind.WAIT: r"cp\.async(\.bulk)?\.(commit_group|wait)|mbarrier\.(try_|test_)?wait",
        Kind.PRODUCT_WAIT: r"wgmma\.(wait|commit|fence)",
        Kind.COPY: r"cp\.async",
        Kind.VOTE: r"bar(rier)?(\.cta)?\.red",
        Kind.BARRIER: r"bar(?!\.warp)\b|barrier|mbarrier|fence|membar",
        Kind.LOAD: r"ldmatrix",
        Kind.MMA: r"mma|wgmma\.mma",
        Kind.EXPONENTIAL: r"ex2",
        Kind.SHUFFLE: r"shfl|vote|bar\.warp|match|redux|activemask|elect",
        Kind.CONVERT: r"cvt\.rn\S*x2|cvt\S*\.(f32|f16|bf16|f16x2|bf16x2)\b|prmt",
        Kind.GLOBAL: r"(ld|st|atom|red|prefetch)\S*\.global|ldu|createpolicy",
        Kind.SHARED: r"(ld|st|atom|red)\S*\.shared|stmatrix",
        Kind.LOCAL: r"(ld|st)\S*\.local",
        Kind.CONTROL: r"setp|set\.|selp|slct|bra|brx|ret|exit|call|\S+\.pred\b",
        Kind.MOVE: r"mov|ld\S*\.param|cvta",
        Kind.FLOAT: r"\S+\.(f32|f64|f16x2|bf16x2|f16|bf16)\b|copysign|testp",
        Kind.INTEGER: r"\S+\.([sub](8|16|32|64))\b|lop3|shf|bfe|bfi|isspacep",
    }
)
_SASS_RULES = _rules(
    {
        Kind.WAIT: r"LDGDEPBAR|DEPBAR|ARRIVES|SYNCS\.PHASECHK",
        Kind.PRODUCT_WAIT: r"WARPGROUP",
        Kind.COPY: r"LDGSTS|UTMALDG|UBLKCP",
        Kind.VOTE: r"BAR\.RED",
        Kind.BARRIER: r"BAR|SYNCS|MEMBAR|FENCE|ERRBAR|CCTL",
        Kind.LOAD: r"LDSM",
        Kind.MMA: r"HMMA|HGMMA|IMMA|QGMMA",
        Kind.EXPONENTIAL: r"MUFU\.EX2",
        Kind.SHUFFLE: r"SHFL|VOTE|WARPSYNC|MATCH|REDUX|ELECT",
        Kind.CONVERT: r"F2F|F2FP|I2F|F2I|PRMT",
        Kind.GLOBAL: r"LDG|STG|ATOMG|RED",
        Kind.SHARED: r"LDS|STS|ATOMS|STSM",
        Kind.LOCAL: r"LDL|STL",
        Kind.FLOAT: r"FADD|FMUL|FFMA|FMNMX|FSEL|MUFU|HADD|HMUL|HFMA|FCHK|DADD|DMUL|DFMA",
        Kind.CONTROL: r"[IFU]SETP|UISETP|PLOP3|UPLOP3|SEL|USEL|BRA|BRX|EXIT|RET|CALL|BSSY|BSYNC|P2R|R2P|FSET|YIELD",
        Kind.MOVE: r"U?MOV|IMAD\.MOV|IMAD\.U32|S2U?R|CS2R|LDC|ULDC|R2UR|LDCU",
        Kind.INTEGER: r"U?IADD|U?IMAD|U?LOP|U?SHF|U?LEA|IABS|IMNMX|VIADD|VIMNMX|BMSK|SGXT|FLO|POPC|BREV|ISCADD|I2I",
    }
)


def kind_of_ptx(opcode: str) -> Kind:
    """The kind of a PTX opcode, e.g. of `ldmatrix.sync.aligned.m8n8.x4.shared.b16`."""
    return _first_match(_PTX_RULES, opcode)


def kind_of_sass(opcode: str) -> Kind:
    """The kind of a machine instruction, e.g. of `HMMA.16816.F32.BF16`."""
    return _first_match(_SASS_RULES, opcode)


def _first_match(rules: list[tuple[re.Pattern[str], Kind]], opcode: str) -> Kind:
    return next((kind for pattern, kind in rules if pattern.match(opcode)), Kind.OTHER)
