"""`attention()` from any thread: one that has never used CUDA, the first of a process, and many at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashwright.attention import attention, forget_kinds
from flashwright.runtime.tensor_maps import map_template

from .tools import assert_right, assert_same_bits, some, truth

THREADS = 16
SECONDS = 120
"""After which a thread's result is no longer waited for."""
STREAMS = ["default stream", "side stream"]


def side_stream(kind: str) -> Any:
    return torch.cuda.Stream() if kind == "side stream" else None


def on(stream: Any) -> AbstractContextManager[Any]:
    """With a stream as the current one; None: with that which is."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_fresh_thread_may_call_after_a_warm_up(family, stream):
    """The thread's call is its first use of CUDA, and its lengths are known, or new."""
    known, new = some(), some(None, (2, 4, 317, 64), (2, 2, 431, 64))
    expected = attention(*known, causal=True, family=family)
    torch.cuda.synchronize()
    other = side_stream(stream)

    def work(problem: Any) -> Any:
        with on(other):
            out = attention(*problem, causal=True, family=family)
            torch.cuda.current_stream().synchronize()
            return out

    for problem in (known, new):
        with ThreadPoolExecutor(1) as pool:
            out = pool.submit(work, problem).result(SECONDS)
        assert_right(out, truth(*problem, {"causal": True})[0])
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(work, known).result(SECONDS), expected)


def test_a_fresh_thread_may_be_the_first_to_need_a_tensor_map():
    """The kernel was loaded by another."""
    problem = some()
    attention(*problem, causal=True)
    torch.cuda.synchronize()
    forget_kinds()
    map_template.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(attention, *problem, causal=True).result(SECONDS)
    assert_right(out, truth(*problem, {"causal": True})[0])


FIRST_CALL = """
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
import torch
import flashwright
from flashwright.runtime.reference import attention_reference

family, side_stream, in_thread = sys.argv[1], sys.argv[2] == "side stream", sys.argv[3] == "thread"
q, k, v = (torch.randn(2, 4, 300, 64, device="cuda").half() for _ in range(3))
torch.cuda.synchronize()
stream = torch.cuda.Stream()

def call():
    with torch.cuda.stream(stream) if side_stream else nullcontext():
        out = flashwright.attention(q, k, v, family=family)
        torch.cuda.current_stream().synchronize()
        return out

if in_thread:
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(call).result(120)
else:
    out = call()
expected, _ = attention_reference(q.double(), k.double(), v.double())
error = ((out.double() - expected).norm() / expected.norm()).item()
print(error)
sys.exit(0 if error < 1e-3 else 1)
"""


@pytest.mark.parametrize(
    ("stream", "place"), [("default stream", "thread"), ("side stream", "thread"), ("side stream", "main")]
)
def test_the_first_call_of_a_process_may_come_from_any_thread(family, stream, place):
    run = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, family, stream, place], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("stream", STREAMS)
def test_sixteen_threads_at_once_get_right_results(family, stream):
    """All of them call with lengths that were used before, and with new ones that the others use as well."""
    known = [some(None, (1, 4, n, 64), (1, 2, n, 64)) for n in (17, 64, 100, 128, 300)]
    new = [some(None, (1, 4, n, 64), (1, 2, n + 50, 64)) for n in range(140, 170)]
    expected = [attention(*problem, causal=True, family=family) for problem in known]
    torch.cuda.synchronize()
    together = Barrier(THREADS, timeout=SECONDS)

    def work(offset: int) -> list[tuple[int, Any, Any]]:
        """The number of a known problem and its output, and the output of a new one; of each call."""
        with on(side_stream(stream)):
            together.wait()
            outputs = []
            for i in range(60):
                which = (i + offset) % len(known)
                again = attention(*known[which], causal=True, family=family)
                outputs.append((which, again, attention(*new[i // 2], causal=True, family=family)))
            torch.cuda.current_stream().synchronize()
            return outputs

    with ThreadPoolExecutor(THREADS) as pool:
        results = [future.result(SECONDS) for future in [pool.submit(work, i) for i in range(THREADS)]]
    for number, wanted in enumerate(expected):
        assert_same_bits([wanted], ([out] for outputs in results for which, out, _ in outputs if which == number))
    for number, problem in enumerate(new):
        first, *others = (out for outputs in results for _, _, out in outputs[2 * number : 2 * number + 2])
        assert_right(first, truth(*problem, {"causal": True})[0])
        assert_same_bits([first], ([out] for out in others))


def test_threads_that_need_a_kernel_at_the_same_time_load_it_once(kernel_counts, family):
    q, k, v = some()
    together = Barrier(THREADS, timeout=SECONDS)

    def work(_: int) -> Any:
        together.wait()
        out = attention(q, k, v, family=family)
        torch.cuda.current_stream().synchronize()
        return out

    with ThreadPoolExecutor(THREADS) as pool:
        outputs = [future.result(SECONDS) for future in [pool.submit(work, i) for i in range(THREADS)]]
    assert kernel_counts.loaded == 1
    assert kernel_counts.compiled <= 1
    assert_right(outputs[0], truth(q, k, v, {})[0])
    assert_same_bits(outputs[:1], ([out] for out in outputs))
