"""Tensor maps written without the driver, by what was found out about its encoding."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import ml_dtypes
import pytest
from fake_gpu import scattered
from hypothesis import given
from hypothesis import strategies as st

from flashwright.hardware.tensor_map import ELEMENT_DTYPES, TensorMap
from flashwright.runtime import tensor_maps
from flashwright.runtime.tensor_maps import WORDS, MapTemplate, common_rows_place

KIND = TensorMap(16, ml_dtypes.bfloat16, (1, 1, 1, 1), (0, 0, 0), (64, 64, 1, 1))
TEMPLATE = MapTemplate(KIND, scattered)


def test_an_encoding_that_is_not_bit_by_bit_is_left_to_the_driver():
    def summed(tensor_map: TensorMap) -> list[int]:
        words = scattered(tensor_map)
        words[9] = sum(tensor_map.shape)  # carries from one bit to the next
        return words

    template = MapTemplate(KIND, summed)
    assert not template.is_known
    words = array("Q", bytes(8 * WORDS))
    template.write(words, 0, (64, 100, 3, 7), (128, 12_800, 38_400))
    expected = summed(TensorMap(16, ml_dtypes.bfloat16, (64, 100, 3, 7), (128, 12_800, 38_400), (64, 64, 1, 1)))
    assert words[1:].tolist() == expected[1:]


def test_the_driver_encodes_in_threads_without_a_context_of_their_own(monkeypatch):
    torch, driver = pytest.importorskip("torch"), pytest.importorskip("cuda.bindings.driver")
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(tensor_maps, "make_context_current", current.append)

    def encode(*arguments: object) -> tuple[int, SimpleNamespace]:
        assert current == [3]
        return 0, SimpleNamespace(opaque=range(WORDS))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    assert tensor_maps.encoded_words(KIND) == array("Q", range(WORDS))


def test_every_element_type_is_handed_to_the_driver(monkeypatch):
    torch, driver = pytest.importorskip("torch"), pytest.importorskip("cuda.bindings.driver")
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tensor_maps, "make_context_current", lambda _: None)

    def encode(dtype: object, *_: object) -> tuple[int, SimpleNamespace]:
        seen.append(dtype)
        return 0, SimpleNamespace(opaque=range(WORDS))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    for dtype in ELEMENT_DTYPES:
        tensor_maps.encoded_words(TensorMap(16, dtype, (64,), (), (64,)))
    kinds = ["UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"]
    assert [kind.name for kind in seen] == [f"CU_TENSOR_MAP_DATA_TYPE_{kind}" for kind in kinds]


@given(
    shape=st.tuples(*[st.integers(1, 2**32)] * 4),
    strides=st.tuples(*[st.integers(0, 2**36 - 1).map(lambda n: 16 * n)] * 3),
)
def test_a_map_is_written_as_the_driver_would_encode_it(shape, strides):
    words = TEMPLATE.blank[:]
    TEMPLATE.write(words, 0, shape, strides)
    words[TEMPLATE.address_word] = 0x7F0000000000
    assert words.tolist() == scattered(TensorMap(0x7F0000000000, ml_dtypes.bfloat16, shape, strides, (64, 64, 1, 1)))


@given(
    rows=st.tuples(st.integers(2, 2**32), st.integers(2, 2**32)),
    strides=st.tuples(*[st.integers(0, 2**36 - 1).map(lambda n: 16 * n)] * 3),
)
def test_another_number_of_rows_changes_a_map_into_that_of_so_many(rows, strides):
    words, expected = TEMPLATE.blank[:], TEMPLATE.blank[:]
    TEMPLATE.write(words, 0, (64, rows[0], 3, 7), strides)
    at, others, up = common_rows_place([TEMPLATE, TEMPLATE])
    words[at] = words[at] & others | rows[1] - 1 << up
    TEMPLATE.write(expected, 0, (64, rows[1], 3, 7), strides)
    assert words == expected
