"""Headers of the CUDA toolkit, where one is installed: for users' sources; the package's own include none."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_DEFAULT_TOOLKIT = Path("/usr/local/cuda")
# Of the packages on PyPI, for CUDA 13.
_PACKAGES = Path("nvidia") / "cu13" / "include"
_HEADER = "cuda_fp16.h"


def toolkit_include_directories() -> list[Path]:
    """Where `cuda_fp16.h` and its like are, and the C++ library beside them; empty without a toolkit."""
    chosen = [Path(os.environ[name]) / "include" for name in TOOLKIT_VARIABLES if os.environ.get(name)]
    candidates = [*chosen, Path(sysconfig.get_path("purelib")) / _PACKAGES, _DEFAULT_TOOLKIT / "include"]
    for directory in candidates:
        if (directory / _HEADER).is_file():
            return [path for path in (directory, directory / "cccl") if path.is_dir()]
    return []
