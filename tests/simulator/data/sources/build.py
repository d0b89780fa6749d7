"""Rebuild the compressed PTX beside this folder: needs nvcc, Triton, and the source distribution of flash-attn 2.8.3.

python build.py path/to/flash_attn-2.8.3
"""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = [
    "-ptx", "-arch=sm_80", "-O3", "-std=c++17", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda",
]  # fmt: skip


def stripped(ptx: str) -> str:
    """PTX without comments and debug information."""
    ptx = re.sub(r"^[ \t]*\.section\b[^{]*\{[^}]*\}", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"//[^\n]*|^[ \t]*\.(loc|file)\b[^\n]*|^\$L__tmp\d+:|^\$L__func_\w+:", "", ptx, flags=re.MULTILINE)
    return re.sub(r"\n\s*\n+", "\n", ptx)


def nvcc(source: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.ptx"
        subprocess.run(["nvcc", *FLAGS, *options, str(HERE / source), "-o", str(output)], check=True)
        return output.read_text()


def main(flash_attention: Path) -> None:
    import triton_attention
    import triton_products

    includes = [HERE / "stubs", flash_attention / "csrc/flash_attn/src", flash_attention / "csrc/cutlass/include"]
    texts = {
        "nvcc_seed_shape": nvcc("seed_shape.cu"),
        "nvcc_flash_attention_2": nvcc(
            "flash_attention_2.cu", "-DFLASHATTENTION_DISABLE_DROPOUT", *(f"-I{path}" for path in includes)
        ),
        **triton_attention.ptx_of(),
        **triton_products.ptx_of(),
    }
    for name, text in texts.items():
        # Without a time stamp, so that the same text gives the same file.
        (HERE.parent / f"{name}.ptx.gz").write_bytes(gzip.compress(stripped(text).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
