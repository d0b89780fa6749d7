"""GPUs by their names: what kernels are chosen for where the GPU itself is not at hand."""

from __future__ import annotations

from flashwright.hardware.architectures import ARCHITECTURES, GPUModel

_ARCHITECTURE_OF_MODEL = {
    "NVIDIA A100-SXM4-80GB": "sm_80",
    "NVIDIA A30": "sm_80",
    "NVIDIA A10": "sm_86",
    "NVIDIA A40": "sm_86",
    "NVIDIA RTX A6000": "sm_86",
    "NVIDIA GeForce RTX 3090": "sm_86",
    "NVIDIA L4": "sm_89",
    "NVIDIA L40S": "sm_89",
    "NVIDIA GeForce RTX 4090": "sm_89",
    "NVIDIA H100 80GB HBM3": "sm_90",
    "NVIDIA H200": "sm_90",
    "NVIDIA GH200 480GB": "sm_90",
    "NVIDIA B200": "sm_100",
    "NVIDIA GeForce RTX 5090": "sm_120",
}
"""By the driver's name, with which measured results are found; NVIDIA's "CUDA GPU Compute Capability" has the rest."""


def _short(name: str) -> str:
    """`rtx4090` of `NVIDIA GeForce RTX 4090`, `a100` of `NVIDIA A100-SXM4-80GB`."""
    words = [word for word in name.casefold().replace("-", " ").split() if word not in ("nvidia", "geforce")]
    return "".join(words) if words[:1] == ["rtx"] else "".join(words[:1])


_MODEL_OF_SHORT_NAME = {_short(name): name for name in _ARCHITECTURE_OF_MODEL}


def gpu_names() -> tuple[str, ...]:
    """The short names that `gpu_named` knows."""
    return tuple(_MODEL_OF_SHORT_NAME)


def gpu_named(name: str) -> GPUModel:
    """The GPU of a short name (`h200`), of the driver's name (`NVIDIA H200`), or any of an architecture (`sm_90`).

    The driver's name of a model that is known in another size, `NVIDIA A100-PCIE-40GB`, stays as it is: results that
    were measured on it are found by it.
    """
    text = " ".join(name.split()) if isinstance(name, str) else ""
    if text in ARCHITECTURES:
        return GPUModel.of_architecture("", text)
    model = _MODEL_OF_SHORT_NAME.get(_short(text))
    if model is None:
        raise ValueError(
            f"gpu: {name!r} is not known; allowed: {', '.join(gpu_names())}, or an architecture: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return GPUModel.of_architecture(text if text.startswith("NVIDIA ") else model, _ARCHITECTURE_OF_MODEL[model])
