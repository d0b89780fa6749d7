"""Measures the cases on this machine's GPU: `PYTHONPATH=src:. python -m tests.hardware.collect OUT_DIRECTORY`.

Runs itself once under Nsight Compute for the counters (`counters.json`), and once without for the results
(`results.npz`). Both files are kept in `tests/hardware/data`.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np

from .cases import (
    ARITHMETIC_CASES,
    ELEMENTS,
    FORWARD_CONFIGS,
    FORWARD_HEADS,
    FORWARD_ROWS,
    MMA_REPEATS,
    SMALL_KERNELS,
)
from .inputs import arithmetic_input, small_kernel_input

METRICS = {
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "copy_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "ldmatrix_instructions": "smsp__inst_executed_op_ldsm.sum",
    "copy_instructions": "smsp__inst_executed_op_ldgsts.sum",
}


def launch_counted() -> None:
    """Launches each counted case exactly once."""
    import torch

    from flashwright import parse_kernel_name_into_config, run_forward

    for text in FORWARD_CONFIGS.values():
        config = parse_kernel_name_into_config(text)
        run_forward(config, *forward_inputs(config, torch))
    torch.cuda.synchronize()
    for source in SMALL_KERNELS.values():
        launch_small(source, small_kernel_input(), ELEMENTS)


def forward_inputs(config, torch):
    from flashwright.problem.reference import random_inputs

    dtype = {"FP16": torch.float16, "BF16": torch.bfloat16}[config.dtype.name]
    arrays = random_inputs(config, heads=FORWARD_HEADS, rows=FORWARD_ROWS)
    return [torch.from_numpy(a.astype(np.float32)).to("cuda", dtype) for a in arrays]


def launch_small(source, values: np.ndarray, outputs: int) -> np.ndarray:
    """One warp of a (const T *in, float *out) kernel, through the CUDA driver."""
    import ctypes

    import torch
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    from flashwright.compiler.nvrtc import compile_source

    major, minor = torch.cuda.get_device_capability()
    program = compile_source(source, f"sm_{major}{minor}")
    kernel = ObjectCode.from_cubin(program.cubin).get_kernel(program.name)
    given = torch.from_numpy(values.view(np.int32)).cuda()
    out = torch.full((outputs,), float("nan"), device="cuda")
    pointers = [ctypes.c_uint64(t.data_ptr()) for t in (given, out)]
    parameters = (ctypes.c_void_p * 2)(*map(ctypes.addressof, pointers))
    stream = torch.cuda.current_stream().cuda_stream
    (status,) = driver.cuLaunchKernel(int(kernel.handle), 1, 1, 1, 32, 1, 1, 0, stream, ctypes.addressof(parameters), 0)
    assert not status, status
    torch.cuda.synchronize()
    return out.cpu().numpy()


def collect_results() -> dict[str, np.ndarray]:
    """Outputs of the forward kernels (fp32) and of the arithmetic cases."""
    import torch

    from flashwright import parse_kernel_name_into_config, run_forward

    results = {}
    for name, text in FORWARD_CONFIGS.items():
        config = parse_kernel_name_into_config(text)
        out = run_forward(config, *forward_inputs(config, torch))
        # Rows 0…15 of each head keep the file small and touch every accumulator of a warp.
        results[name] = out[:, :, :16].float().cpu().numpy()
    for case in ARITHMETIC_CASES:
        outputs = MMA_REPEATS * 128 if case.inputs == "mma" else 4096
        results[case.name] = launch_small(case.source, arithmetic_input(case), outputs)
    return results


def collect_counters() -> dict[str, dict[str, int]]:
    """Nsight Compute's counters of every counted case, in launch order."""
    command = [
        "ncu", "--csv", "--page", "raw", "--clock-control", "none", "--cache-control", "none",
        "--metrics", ",".join(METRICS.values()),
        "-k", "regex:flash_forward_kernel|shared_|ldmatrix_|cp_async_|global_",
        sys.executable, "-m", "tests.hardware.collect", "--launch",
    ]  # fmt: skip
    return parse_counters(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse_counters(text: str) -> dict[str, dict[str, int]]:
    """The counters in Nsight Compute's CSV, by case; launches are in the order of the cases."""
    table = text[text.index('"ID"') :]
    rows = [row for row in csv.DictReader(io.StringIO(table)) if row["ID"].strip()]
    names = [*FORWARD_CONFIGS, *SMALL_KERNELS]
    return {
        name: {key: int(row[metric].replace(",", "")) for key, metric in METRICS.items()}
        for name, row in zip(names, rows, strict=True)
    }


def main() -> None:
    if sys.argv[1] == "--launch":
        launch_counted()
        return
    import torch

    target = Path(sys.argv[1])
    np.savez_compressed(target / "results.npz", **collect_results())
    document = {
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "metrics": METRICS,
        "cases": collect_counters(),
    }
    (target / "counters.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
