"""`simulate_forward` lets its caller choose what happens on a hazard of a kernel of the package."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from flashwright import FlashForwardKernelConfig, random_inputs, simulate_forward
from flashwright.runtime import simulated
from flashwright.simulator import SimulationError


@pytest.fixture
def without_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, and lose their barriers."""
    compile_kernel = simulated.compile_kernel

    def broken(*arguments: Any, **options: Any) -> Any:
        kernel = compile_kernel(*arguments, **options)
        ptx = re.sub(r"bar\.sync\s+0;", "", kernel.ptx)
        assert ptx != kernel.ptx
        return replace(kernel, program=replace(kernel.program, ptx=ptx))

    monkeypatch.setattr(simulated, "compile_kernel", broken)


def test_hazards_of_the_package_s_kernels_stop_or_are_collected(
    without_barriers: None, small_config: FlashForwardKernelConfig
) -> None:
    inputs = random_inputs(small_config, heads=1, rows=96)
    with pytest.raises(SimulationError) as caught:
        simulate_forward(small_config, *inputs)
    collected = simulate_forward(small_config, *inputs, check_hazards="collect").run.findings
    assert str(collected[0].error) == str(caught.value)
    assert {finding.kind for finding in collected} == {"async-copy", "race"}
    assert all(finding.error.source_line is not None for finding in collected)
    some = simulate_forward(small_config, *inputs, check_hazards={"async-copy": "ignore", "race": "collect"}).run
    assert {finding.kind for finding in some.findings} == {"race"}
    assert simulate_forward(small_config, *inputs, check_hazards=False).run.findings == []
