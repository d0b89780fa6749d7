"""A family that the package does not know, registered in one line, goes through everything that families go through."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from command_line import flashwright
from toy_family import TOY_FORWARD, ToyForwardKernelConfig

from flashwright import attention, compile_kernel, parse_config, rejection_reason, should_autotune_config, tile_shapes
from flashwright.choice.choose import best_family, forget_choices
from flashwright.choice.problem import problem_of
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels import registry
from flashwright.kernels.family import Occasion
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.problem.reference import TOLERANCE, reference_forward, relative_error
from flashwright.problem.window import FULL, Window
from flashwright.runtime.simulated import simulate_forward
from flashwright.workbench.explain import explain_config
from flashwright.workbench.explain.compare import compare_facts
from flashwright.workbench.explain.comparison_page import comparison_page
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.ladder import climb, read_ladder, write_ladder
from flashwright.workbench.ladder_plot import ladder_figure
from flashwright.workbench.tuning.space import enumerate_space

TOY = "toy (BF16, 32, 64, 4)"


@pytest.fixture(scope="module", autouse=True)
def toy_family() -> Iterator[None]:
    registry.register(TOY_FORWARD)
    yield
    registry.unregister(TOY_FORWARD)
    forget_choices()


def inputs(dtype: DType, q_rows: int, keys: int, head_dim: int = 32, q_heads: int = 2) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = ((2, q_heads, q_rows, head_dim), (2, 1, keys, head_dim), (2, 1, keys, head_dim))
    return [generator.standard_normal(shape).astype(NUMPY_DTYPES[dtype]) for shape in shapes]


# --- Names, shapes, kernels ----------------------------------------------------------------------------------------


def test_a_config_is_found_by_its_short_form_and_by_its_kernels_name():
    config = ToyForwardKernelConfig(DType.BF16, 32, 64, 4)
    assert parse_config(TOY) == parse_config(config.kernel_name()) == config
    assert config.short_form() == TOY
    assert registry.family_of(config) is TOY_FORWARD


def test_a_text_that_names_none_is_refused_in_the_familys_words():
    with pytest.raises(ValueError, match="names no toy kernel; expected a short form such as 'toy"):
        parse_config("toy (BF16, 32)")


def test_shapes_and_the_filter_find_the_family_by_the_config():
    assert tile_shapes(TOY).threads == 64
    with pytest.raises(ValueError, match="B_r: 48 is not allowed; allowed: multiples of 32 up to 256"):
        tile_shapes("toy (BF16, 32, 48, 4)")
    assert rejection_reason(TOY) is None and should_autotune_config(TOY)
    assert rejection_reason("toy (BF16, 32, 32, 4)").startswith("warps: B_r = 32 is one warp")


def test_it_compiles_for_the_oldest_architecture_and_for_later_ones():
    assert compile_kernel(TOY).arch == "sm_80"
    kernel = compile_kernel(TOY, "sm_90")
    assert (kernel.arch, kernel.threads, kernel.shared_bytes) == ("sm_90", 64, 0)
    assert "toy_forward_kernel" in kernel.name


@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "q_rows", "keys", "head_dim"),
    [
        (DType.BF16, FULL, 0.0, 75, 37, 32),
        (DType.FP16, Window(None, 0), 0.0, 33, 70, 24),
        (DType.BF16, Window(5, 2), 3.0, 70, 33, 32),  # some rows have no key
    ],
    ids=["full", "causal, narrow heads", "window, soft cap"],
)
def test_it_is_right_against_float64_without_a_hazard(dtype, window, softcap, q_rows, keys, head_dim):
    q, k, v = inputs(dtype, q_rows, keys, head_dim)
    config = f"toy ({dtype.name}, 32, 64, 4)"
    found = simulate_forward(config, q, k, v, window=window, softcap=softcap, return_lse=True, check_hazards=True)
    output, lse = reference_forward(q, k, v, window=window, softcap=softcap)
    assert relative_error(found.output, output) <= TOLERANCE[dtype]
    assert np.array_equal(np.isinf(found.lse), np.isinf(lse))
    finite = np.isfinite(lse)
    assert np.allclose(found.lse[finite], lse[finite], atol=1e-5)


# --- attention(), the choice, the search ---------------------------------------------------------------------------


def test_attention_runs_it_on_arrays_and_on_cpu_tensors():
    torch = pytest.importorskip("torch")
    arrays = inputs(DType.FP16, 40, 50)
    expected, _ = reference_forward(*arrays, window=Window(None, 0))
    config = "toy (FP16, 32, 64, 4)"
    of_arrays = attention(*arrays, causal=True, config=config, backend="simulator")
    of_tensors = attention(*map(torch.from_numpy, arrays), causal=True, config=parse_config(config))
    assert relative_error(of_arrays, expected) <= TOLERANCE[DType.FP16]
    assert np.array_equal(of_tensors.numpy(), of_arrays)


def test_attention_takes_its_default_config_by_the_name_of_the_family():
    arrays = inputs(DType.FP16, 40, 50)
    by_family = attention(*arrays, family="toy", backend="simulator")
    assert np.array_equal(by_family, attention(*arrays, config="toy (FP16, 32, 64, 4)", backend="simulator"))


def test_it_is_not_chosen_where_it_does_not_suit():
    gpu = GPUModel.of_architecture("NVIDIA A100", "sm_80")
    occasion = Occasion(DType.BF16, 64, False, "long", "long", gpu)
    assert TOY_FORWARD.runs_on(gpu.arch)
    assert best_family(occasion).name == "ampere"


def test_its_space_is_searched_the_promising_first():
    space = enumerate_space(problem_of(family="toy", d_head=64, q_length=512))
    assert (space.enumerated, space.kept) == (6, 4)
    assert {removal.rule: removal.count for removal in space.removals} == {"shapes": 0, "warps": 2}
    assert [config.B_c for config in space.configs] == [4, 4, 1, 1]


# --- The ladder ----------------------------------------------------------------------------------------------------


def test_its_ladder_is_climbed_stored_and_drawn(tmp_path):
    ladder = climb(d_head=32, family="toy", progress=False)
    assert [result.rung.change for result in ladder.rungs] == ["base: key by key", "four keys a step"]
    assert ladder.wrong == []
    write_ladder(tmp_path / "ladder.json", ladder)
    assert read_ladder(tmp_path / "ladder.json").rungs == ladder.rungs
    figure = ladder_figure(ladder)
    assert "The Toy ladder: BF16, d_head 32" in figure.get_suptitle()


def test_the_ladder_command_knows_it():
    code, out, error = flashwright("ladder", "--family", "toy", "--d-head", "32")
    assert code == 0, error
    assert "The Toy ladder" in out and "four keys a step" in out


# --- explain and compare -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts():
    return explain_config(TOY, progress=False)


def test_it_is_explained_by_what_the_compiler_and_the_simulator_know(facts):
    assert (facts.family, facts.arch) == ("Toy", "sm_80")
    assert [(knob.name, knob.value) for knob in facts.knobs] == [
        ("dtype", "BF16"), ("d_head", "32"), ("B_r", "64"), ("B_c", "4"),
    ]  # fmt: skip
    assert facts.simulation.relative_error < TOLERANCE[DType.BF16]
    assert facts.loop.ptx.by_kind["exponential (ex2)"] == 1 + 4  # one for the sums, one for each key
    assert facts.simulation.step.instructions == facts.loop.ptx.total
    assert json.loads(json.dumps(facts.to_dict()))["config"] == TOY


def test_its_timeline_has_the_phases_that_its_source_marks_and_nothing_under_way(facts):
    timeline = facts.timeline
    assert timeline.flights == ()
    assert [phase.name for phase in timeline.phases] == ["scores", "output"] * 2
    assert sum(span.length for span in timeline.spans) == timeline.instructions


def test_its_page_has_no_section_on_what_it_does_not_explain(facts):
    page = config_page(facts)
    assert "Forward kernel of the Toy family" in page
    for section in ("knobs", "timeline", "registers", "occupancy", "loop", "simulation"):
        assert f'<section id="{section}">' in page
    for section in ("mma", "shapes"):
        assert f'id="{section}"' not in page and f'"#{section}"' not in page
    assert "Double buffering" not in page and "on the banks" not in page
    assert page.count("<svg") == 2  # the timeline and the registers


def test_it_does_not_differ_from_itself(facts):
    comparison = compare_facts(facts, facts)
    assert comparison.differing == 0
    assert '<section id="buffering">' not in comparison_page(comparison)


def test_the_commands_explain_compare_and_simulate_it(tmp_path):
    page = tmp_path / "page.html"
    code, out, error = flashwright("explain", TOY, "--html", str(page), "--json")
    assert code == 0, error
    assert json.loads(out)["family"] == "Toy" and page.exists()
    code, out, error = flashwright("compare", TOY, "toy (BF16, 32, 64, 1)", "--differing")
    assert code == 0, error
    assert "B_c" in out
    code, out, error = flashwright("simulate", TOY, "--rows", "40", "--json")
    assert code == 0, error
    assert json.loads(out)["relative_error"] < TOLERANCE[DType.BF16]


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_a_config_without_a_kernel_is_refused_at_once(command):
    code, out, error = flashwright(command, "toy (BF16, 32, 48, 4)")
    assert (code, out) == (1, "")
    assert "B_r: 48 is not allowed" in error


# --- Registering ---------------------------------------------------------------------------------------------------


def test_a_family_is_registered_once():
    with pytest.raises(ValueError, match="'toy' of forward is registered already"):
        registry.register(TOY_FORWARD)
