"""Benchmarks on a real GPU: small cells, for whether they are measured, not for how fast they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import families, family_named, family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import MEDIUM
from flashwright.workbench.bench.results import OURS, ours_of, read_result
from flashwright.workbench.bench.scores import KINDS

from .tools import this_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.long]

SMALL = ["bench", "--d-head", "64", "--seqlen", "256", "--seqlen", "512", "--tokens", "2048", "--hidden", "256"]


SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
"""Of processes that start in another directory."""


def families_of_this_gpu() -> list[str]:
    return [family.name for family in families() if family.runs_on(this_gpu().arch)]


def flashwright(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "flashwright", *arguments], capture_output=True, text=True,
        timeout=240, cwd=cwd, env=ENVIRONMENT,
    )  # fmt: skip


def test_bench_measures_ours_beside_the_peers_of_pytorch(tmp_path):
    path = tmp_path / "result.json"
    peers = "sdpa-fa2,sdpa-cudnn,sdpa-efficient"
    run = flashwright(*SMALL, "--peers", peers, "--json", "--output", str(path), "--plot", str(tmp_path))
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["environment"]["gpu"]
    assert document["environment"]["driver"]
    result = read_result(path)
    assert len(result.cells) == 4
    for found in result.cells:
        assert found.measurements.keys() >= {OURS, "sdpa-fa2"}
        for measurement in found.measurements.values():
            assert 0 < measurement.relative_error < 8e-3
            assert 1 < measurement.host_us < 10_000
        assert 0.1 < found.ratio("sdpa-fa2") < 10
    assert (tmp_path / "bench.png").exists()


@pytest.mark.parametrize("operation", ["backward", "train"])
def test_gradients_are_measured_beside_those_of_pytorch(operation, tmp_path):
    path = tmp_path / "result.json"
    run = flashwright(*SMALL, "--operation", operation, "--peers", "sdpa-fa2,sdpa-cudnn", "--output", str(path))
    assert run.returncode == 0, run.stderr
    result = read_result(path)
    assert result.operation == operation
    for found in result.cells:
        assert found.measurements.keys() >= {OURS, "sdpa-fa2"}, found.failures
        for measurement in found.measurements.values():
            assert 0 < measurement.relative_error < 8e-3
        kernels = [parse_config(text) for text in found.measurements[OURS].kernel.split("; ")]
        assert family_of(kernels[-1]).operation.name == "backward"
        assert 0.1 < found.ratio("sdpa-fa2") < 10


@pytest.mark.parametrize("family", [family.name for family in families("backward")])
def test_a_config_of_the_backward_is_measured_by_itself(family, tmp_path):
    described = family_named(family, "backward")
    if not described.runs_on(this_gpu().arch):
        pytest.skip(f"the {family} family does not run on {this_gpu().arch}")
    config = str(described.default_config(Occasion(DType.BF16, 64, False, MEDIUM, MEDIUM, this_gpu())))
    path = tmp_path / "result.json"
    run = flashwright(
        *SMALL, "--operation", "backward", "--config", config, "--peers", "sdpa-fa2", "--output", str(path)
    )
    assert run.returncode == 0, run.stderr
    for found in read_result(path).cells:
        assert found.measurements[OURS].kernel == config
        assert found.measurements[OURS].relative_error < 8e-3


def test_decodes_are_measured_on_contiguous_paged_and_uneven_caches(tmp_path):
    size = ["--keys", "1024", "--batch", "2", "--heads", "8", "--kv-heads", "2", "--d-head", "64", "--rounds", "2"]
    for number, options in enumerate((["--rows", "1", "--rows", "4"], ["--pages", "64"], ["--uneven"])):
        path = tmp_path / f"{number}.json"
        run = flashwright(
            "bench", "--operation", "decode", *size, *options, "--peers", "sdpa-fa2,sdpa-cudnn", "--output", str(path)
        )
        assert run.returncode == 0, run.stderr
        for found in read_result(path).cells:
            assert found.measurements[OURS].relative_error < 8e-3
            assert found.measurements[OURS].kernel
            assert ("sdpa-fa2" in found.measurements) == (found.cell.page == 0), found.failures
            assert found.speed(OURS) > 0


@pytest.mark.parametrize("rows", [1, 16])
def test_a_config_of_the_decode_is_measured_by_itself(rows, tmp_path):
    occasion = Occasion(DType.BF16, 64, False, MEDIUM, MEDIUM, this_gpu(), packed_rows=4 * rows)
    config = str(family_named("ampere", "decode").default_config(occasion))
    path = tmp_path / "result.json"
    size = ["--d-head", "64", "--keys", "1024", "--batch", "2", "--rows", str(rows), "--pages", "64", "--rounds", "2"]
    run = flashwright(
        "bench", "--operation", "decode", *size, "--config", config, "--peers", "sdpa-fa2", "--output", str(path)
    )
    assert run.returncode == 0, run.stderr
    (found,) = read_result(path).cells
    assert found.measurements[OURS].kernel == config
    assert found.measurements[OURS].relative_error < 8e-3


def test_grouped_heads_are_measured_and_peers_without_them_listed():
    run = flashwright(*SMALL, "--kv-heads", "2", "--causal", "--peers", "sdpa-fa2,sdpa-efficient", "--json")
    assert run.returncode == 0, run.stderr
    for cell in json.loads(run.stdout)["cells"]:
        assert OURS in cell["implementations"]
        assert {"sdpa-fa2", "sdpa-efficient"} <= cell["implementations"].keys() | cell["failures"].keys()


PEER = """
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal):
    return scaled_dot_product_attention(q, k, v, is_causal=causal)
"""


def test_kinds_of_scores_families_and_a_function_of_the_users_own_are_measured_together(tmp_path):
    (tmp_path / "my_peers.py").write_text(PEER)
    ours = families_of_this_gpu()
    run = flashwright(
        *SMALL, "--causal", "--scores", "all", "--family", ",".join(ours), "--peers", "sdpa-fa2", "--peer",
        "my_peers:attention", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    cells = json.loads(run.stdout)["cells"]
    assert [cell["scores"] for cell in cells] == list(KINDS) * 2
    for cell in cells:
        assert cell["failures"] == {}
        assert cell["implementations"].keys() == {*map(ours_of, ours), "sdpa-fa2", "my_peers:attention"}


def test_errors_of_every_family_are_compared_on_every_kind_of_scores(tmp_path):
    path = tmp_path / "errors.json"
    script = Path(__file__).parents[2] / "benchmarks/accuracy.py"
    arguments = ["--dtype", "BF16", "--d-head", "64", "--seqlen", "200", "--output", str(path)]
    run = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    document = json.loads(path.read_text())
    assert document["failures"] == [], run.stdout
    assert len(document["cells"]) == 2 * len(KINDS) * len(families_of_this_gpu())
    assert run.returncode == (0 if all(cell["within_limits"] for cell in document["cells"]) else 1)
