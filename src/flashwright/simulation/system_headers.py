"""Headers that users' sources include in angle brackets: what NVRTC has of them, and where the others come from."""

from __future__ import annotations

import re
from pathlib import Path

HEADERS = Path(__file__).parent / "headers"
"""Headers of C for device code, and those of CUDA that every program includes: what they declare is mostly built into
NVRTC, which has no such files."""
TOOLKIT_PACKAGES = ("nvidia-cuda-runtime==13.*", "nvidia-cuda-crt==13.*", "nvidia-cuda-cccl==13.*")
"""Packages on PyPI that hold the toolkit's headers."""
_OF_TOOLKIT = re.compile(r"(cuda|cooperative_groups|mma\.h|cub/|thrust/|nv/|crt/|builtin_types|texture_types)")


def missing_header_hint(log: str) -> str | None:
    """Where to find the header that the compiler did not; None if it misses none."""
    missing = re.search(r'open source file "([^"]+)"', log)
    if missing is None:
        return None
    header = missing[1]
    if _OF_TOOLKIT.match(header):
        packages = " ".join(f"'{package}'" for package in TOOLKIT_PACKAGES)
        return (
            f"{header} is a header of the CUDA toolkit. Install its headers (pip install {packages}), or name a "
            "toolkit ($CUDA_HOME, $CUDA_PATH; /usr/local/cuda is found)."
        )
    if re.fullmatch(r"[a-z_]+", header):
        return (
            f"NVRTC has no C++ standard library, and no <{header}>. The toolkit's own, for device code, is "
            f"cuda::std: #include <cuda/std/{header}>, where it has that header."
        )
    return (
        f"{header} was looked for beside the file, in directories that are named (--include, include=), in an "
        "installed CUDA toolkit ($CUDA_HOME, $CUDA_PATH, /usr/local/cuda), and among the headers of C for device code."
    )
