"""After `warm_up()`, the first calls of what was warmed up compile nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import flashwright as fw
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.workbench.tuning.reload import reload

from .tools import assert_right, some, starts_of, truth

ROWS_AND_KEYS = [(700, 700), (1, 700), (1500, 1500), (5000, 5000)]
"""A prefill, a step of decoding, and longer sequences."""


@pytest.fixture
def nothing_on_disk(tmp_path, monkeypatch, kernel_counts) -> Any:
    """A process that has never compiled: no program in the cache, no kernel loaded."""
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    reload()
    yield kernel_counts
    monkeypatch.undo()
    reload()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ({"causal": True}, {"causal": True}),
        ({"causal": False, "grouped": True}, {}),
        (
            {"causal": True, "window": (256, -1), "softcap": 20.0},
            {"causal": True, "window": (256, -1), "softcap": 20.0},
        ),
    ],
    ids=str,
)
def test_the_first_calls_after_a_warm_up_compile_nothing(nothing_on_disk, kind, options):
    kv_heads = 2 if kind.get("grouped") else 4
    fw.warm_up(128, "bf16", **kind)
    assert nothing_on_disk.compiled > 0
    nothing_on_disk.reset()
    for rows, keys in ROWS_AND_KEYS:
        q, k, v = some(torch.bfloat16, (1, 4, rows, 128), (1, kv_heads, keys, 128))
        assert_right(fw.attention(q, k, v, **options), truth(q, k, v, options)[0])
    assert nothing_on_disk.compiled == 0


def test_training_compiles_nothing_after_a_warm_up(nothing_on_disk):
    fw.warm_up(64, "fp16", causal=True, training=True)
    assert nothing_on_disk.compiled > 0
    nothing_on_disk.reset()
    q, k, v = some(torch.float16, (1, 4, 300, 64), (1, 4, 300, 64), grad=True)
    out = fw.attention(q, k, v, causal=True)
    out.sum().backward()
    assert_right(out.detach(), truth(q.detach(), k.detach(), v.detach(), {"causal": True})[0])
    assert nothing_on_disk.compiled == 0


def test_packed_sequences_compile_nothing_after_a_warm_up(nothing_on_disk):
    fw.warm_up(64, "bf16", causal=True, packed=True)
    assert nothing_on_disk.compiled > 0
    nothing_on_disk.reset()
    q, k, v = some(torch.bfloat16, (300, 4, 64), (300, 4, 64))
    starts = starts_of([300])
    out = fw.flash_attn_varlen_func(q, k, v, starts, starts, 300, 300, causal=True)
    whole = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    assert_right(out.transpose(0, 1).unsqueeze(0), truth(*whole, {"causal": True})[0])
    assert nothing_on_disk.compiled == 0


def test_a_second_warm_up_compiles_nothing(nothing_on_disk):
    fw.warm_up(64, "bf16", causal=True)
    assert nothing_on_disk.compiled > 0
    nothing_on_disk.reset()
    fw.warm_up(64, "bf16", causal=True)
    assert nothing_on_disk.compiled == 0
