"""The package as a user installs it: what it exports, what it needs, what travels in the wheel."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flashwright

ROOT = Path(__file__).resolve().parents[1]
PUBLIC_NAMES = {
    "AttentionOptions",
    "AttentionVariant",
    "CompileError",
    "DType",
    "FlashForwardKernelConfig",
    "ForwardKernelTileShapes",
    "GPUError",
    "GemmShape",
    "Kernel",
    "LadderRung",
    "Occupancy",
    "compile_kernel",
    "compile_many",
    "get_autotuning_kernel_configs",
    "get_kernel_progression",
    "get_kernel_progression_configs",
    "occupancy",
    "parse_kernel_name_into_config",
    "random_inputs",
    "rejection_reason",
    "run_forward",
    "should_autotune_config",
    "simulate_forward",
    "simulate_kernel",
    "tile_shapes",
    "warm_up",
}
COMPILE_A_KERNEL = """
import json, sys
import flashwright
config = flashwright.parse_kernel_name_into_config("(FP16, 64, 64, 32, 4): async+load_2_2_2_tiles+opt_softmax")
kernel = flashwright.compile_kernel(config)
facts = {"elf": kernel.cubin[:4] == b"\\x7fELF", "cached": kernel.program.from_cache}
print(json.dumps(facts | {"file": flashwright.__file__}))
"""


def run_python(code: str, *, python: str | Path = sys.executable, **options) -> str:
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Importing -----------------------------------------------------------------------------------------------


def test_the_public_names_are_exported():
    assert set(flashwright.__all__) >= PUBLIC_NAMES
    assert [name for name in flashwright.__all__ if not hasattr(flashwright, name)] == []


def test_the_package_imports_and_compiles_without_torch_and_without_a_driver():
    code = f"""
import sys
sys.modules["torch"] = None  # any import of it fails
{COMPILE_A_KERNEL}
assert sys.modules["torch"] is None
with open("/proc/self/maps") as maps:
    assert "libcuda.so" not in maps.read(), "the CUDA driver was loaded"
try:
    flashwright.run_forward(config, None, None, None)
except flashwright.GPUError as error:
    assert "pip install 'flashwright[torch]'" in str(error)
else:
    raise AssertionError("run_forward needs torch")
"""
    if not Path("/proc/self/maps").exists():
        code = "\n".join(line for line in code.splitlines() if "maps" not in line)
    assert json.loads(run_python(code))["elf"]


def test_importing_the_package_does_not_import_torch():
    pytest.importorskip("torch")
    run_python("import sys, flashwright; assert 'torch' not in sys.modules")


def test_ptx_is_simulated_without_cuda_packages_and_without_torch():
    ptx = ROOT / "tests" / "simulator" / "data" / "nvcc_saxpy.ptx"
    code = f"""
import sys
sys.modules["cuda"] = sys.modules["torch"] = None  # any import of them fails
import numpy as np
from flashwright.simulator import SimulatedGPU
gpu = SimulatedGPU()
module = gpu.load(open({str(ptx)!r}, "rb").read())
x, y = (gpu.to_device(np.full(64, value, np.float32)) for value in (2, 3))
module.launch(module.kernels[0], 1, 64, args=[y, x, np.float32(3), np.int32(64)])
assert (gpu.to_host(y) == 7).all()
sys.argv = ["flashwright", "simulate", {str(ptx)!r}, "--block", "64", "--arg", "zeros:f32:64",
            "--arg", "random:f32:64", "--arg", "f32:3", "--arg", "i32:64"]
import runpy
runpy.run_module("flashwright", run_name="__main__")
"""
    assert "fma.rn.f32" in run_python(code)


# --- The wheel -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_carries_the_device_code_the_tuning_results_and_the_typing_marker(wheel):
    package = ROOT / "src" / "flashwright"
    patterns = ("*.cuh", "choice/shipped/*.json", "simulation/headers/*")
    data = {path for pattern in patterns for path in package.rglob(pattern)}
    files = {path.relative_to(package.parent).as_posix() for path in data}
    examples = ("cuda/ptx/mma.cuh", "choice/shipped/h200.json", "simulation/headers/cstdint")
    assert {f"flashwright/{name}" for name in examples} <= files
    names = set(zipfile.ZipFile(wheel).namelist())
    assert files | {"flashwright/py.typed"} <= names
    assert [name for name in names if not name.startswith(("flashwright/", "flashwright-"))] == []


def test_the_wheel_installed_outside_the_checkout_compiles_a_kernel(wheel, tmp_path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    # The dependencies are those of the tests' environment: everything installed there but the package itself.
    site_packages = next(environment.glob("lib/python*/site-packages"))
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if installed.suffix != ".pth" and not installed.name.startswith("flashwright"):
            (site_packages / installed.name).symlink_to(installed)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["FLASHWRIGHT_CACHE_DIR"] = str(tmp_path / "cache")
    facts = json.loads(run_python(COMPILE_A_KERNEL, python=python, cwd=tmp_path, env=variables))
    assert Path(facts["file"]).is_relative_to(site_packages)
    assert facts["elf"]
    assert not facts["cached"]


@pytest.mark.parametrize(("platform", "has_cuda"), [("linux", True), ("win32", True), ("darwin", False)])
def test_the_wheel_needs_cuda_packages_where_they_exist(wheel, platform, has_cuda):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    requirements = [Requirement(line.split(":", 1)[1]) for line in lines if line.startswith("Requires-Dist:")]
    needed = {
        item.name
        for item in requirements
        if item.marker is None or item.marker.evaluate({"sys_platform": platform, "extra": ""})
    }
    assert {"numpy", "ml_dtypes"} <= {name.replace("-", "_") for name in needed}
    assert ({"cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"} <= needed) == has_cuda
    assert any("cuda" in name for name in needed) == has_cuda


# --- What the package index shows ------------------------------------------------------------------------------


def metadata_of(directory: Path, **environment: str) -> email.message.Message:
    """Of the wheel that the tree would be built into."""
    code = "import sys; from hatchling.build import prepare_metadata_for_build_wheel as p; p(sys.argv[1])"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLASHWRIGHT_")}
    subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, env=variables | environment, check=True)
    (file,) = directory.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text("utf-8"))


LINKS = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def test_the_readme_on_the_package_index_refers_to_no_file_beside_it(tmp_path):
    metadata = metadata_of(tmp_path)
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata.get_all("Project-URL") is None
    text = metadata.get_payload()
    assert "TFLOP/s over sequence length" in text and "![" not in text
    assert all(place.startswith(("#", "https://")) for place in LINKS.findall(text))


def test_a_build_that_knows_the_projects_address_links_to_it(tmp_path):
    metadata = metadata_of(
        tmp_path, FLASHWRIGHT_PROJECT_URL="https://host/project", FLASHWRIGHT_FILES_URL="https://host/files/v1"
    )
    assert metadata.get_all("Project-URL") == [
        "Homepage, https://host/project",
        "Changelog, https://host/files/v1/CHANGELOG.md",
    ]
    text = metadata.get_payload()
    assert "(https://host/files/v1/benchmarks/results/bench_h200_bf16.svg)" in text
    for place in LINKS.findall(text):
        if place.startswith("https://host/files/v1/"):
            assert (ROOT / place.removeprefix("https://host/files/v1/").partition("#")[0]).exists()


# --- Its commands --------------------------------------------------------------------------------------------


def test_every_test_of_a_gpu_is_among_those_that_make_test_gpu_runs():
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")}
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    (line,) = (line for line in makefile.splitlines() if line.startswith("GPU_TESTS"))
    listed = [ROOT / word for word in line.split() if word.startswith("tests/")]
    left_out = {path for path in marked if not any(path.is_relative_to(place) for place in listed)}
    assert left_out == {Path(__file__)}  # which names the mark only here
