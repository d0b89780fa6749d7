"""Tensor maps written here are those of the CUDA driver, bit for bit."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashwright.hardware.tensor_map import Fill, Swizzle, TensorMap
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.runtime.tensor_maps import WORDS, common_rows_place, encoded_words, map_template

ELEMENT_BYTES = 2
MAPS_OF_A_KIND = 500
KINDS = {
    "bf16 rows of q": (DType.BF16, (64, 64, 1, 1), Swizzle.B128, Fill.ZERO),
    "fp16 rows of k": (DType.FP16, (64, 176, 1, 1), Swizzle.B128, Fill.ZERO),
    "fp16, NaN outside": (DType.FP16, (32, 128, 1, 1), Swizzle.B64, Fill.NAN),
    "bf16 matrices": (DType.BF16, (8, 256), Swizzle.NONE, Fill.NAN),
}


@pytest.fixture(autouse=True)
def a_hopper_gpu(arch) -> None:
    if arch != "sm_90":
        pytest.skip(f"the GPU is an {arch}; tensor maps are used on sm_90")
    torch.zeros(1, device="cuda")  # the driver is initialised


def random_tensor(draw: random.Random, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides (bytes), innermost first, of a tensor as PyTorch lays it out: outer dimensions in any order,
    with gaps, and strides that mean nothing where a dimension has size 1 or is expanded."""
    most = {2: (256, 2**30), 4: (256, 200_000, 300, 80_000)}[rank]
    shape = (8 * draw.randint(1, most[0] // 8), *(_size(draw, size) for size in most[1:]))
    order = list(range(1, rank))
    draw.shuffle(order)
    strides, bytes_inside = [0] * rank, ELEMENT_BYTES * shape[0]
    for axis in order:
        bytes_inside += 16 * draw.choice([0, 0, 1, draw.randint(0, 4096)])
        if shape[axis] > 1 and draw.random() < 0.9 and bytes_inside * shape[axis] < 2**40:
            strides[axis] = bytes_inside
            bytes_inside *= shape[axis]
    return shape, tuple(strides[1:])


def _size(draw: random.Random, most: int) -> int:
    return 1 if draw.random() < 0.1 else draw.choice([draw.randint(2, 64), draw.randint(2, most), most])


@pytest.mark.parametrize("name", KINDS)
def test_maps_of_random_tensors_are_those_of_the_driver(name):
    dtype, box, swizzle, fill = KINDS[name]
    rank = len(box)
    kind = TensorMap(1 << 20, NUMPY_DTYPES[dtype], (1,) * rank, (0,) * (rank - 1), box, swizzle=swizzle, fill=fill)
    template = map_template(kind)
    assert template.is_known
    draw = random.Random(name)
    for _ in range(MAPS_OF_A_KIND):
        shape, strides = random_tensor(draw, rank)
        address = 16 * draw.randrange(1, 2**43)
        first = draw.choice([0, WORDS])
        words = array("Q", bytes(8 * 2 * WORDS))
        words[first : first + WORDS] = template.blank
        template.write(words, first, shape, strides)
        words[first + template.address_word] = address
        expected = encoded_words(replace(kind, address=address, shape=shape, strides=strides))
        assert words[first : first + WORDS] == expected, (address, shape, strides)
        assert not any(words[WORDS - first : 2 * WORDS - first])
        if rank > 1 and shape[1] > 1:
            word, others, up = common_rows_place([template])
            at = first + word
            words[at] = words[at] & others | shape[1] - 2 << up
            expected = encoded_words(
                replace(kind, address=address, shape=(shape[0], shape[1] - 1, *shape[2:]), strides=strides)
            )
            assert words[first : first + WORDS] == expected, (address, shape, strides)
