"""The parameters of launches in the host's memory, as the driver takes them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashwright.hardware.tensor_map import TensorMap
from flashwright.hardware.units import VECTOR_BYTES

WORD_BYTES = 8
SOME_ADDRESS = VECTOR_BYTES
"""In the place of one that is filled in at every run."""


class Parameters:
    """A launch's parameters in 8-byte words, and behind them their addresses."""

    __slots__ = ("address", "schedule", "words")

    def __init__(self, words: array[int], first_words: Sequence[int]) -> None:
        """Of parameters that begin at so many of the words, which become this object's own."""
        self.words = words
        self.schedule: Any = None
        """Which was written last, where there is one among the parameters."""
        places = len(words)
        words.extend(first_words)
        base = words.buffer_info()[0]
        for index, first in enumerate(first_words):
            words[places + index] = base + WORD_BYTES * first
        self.address = base + WORD_BYTES * places
        """Of the addresses."""


def word_of(parameter: type[ctypes.Structure], field: str) -> int:
    """The word in which a field begins."""
    return int(getattr(parameter, field).offset) // WORD_BYTES


def words_of(parameter: ctypes.Structure) -> array[int]:
    data = bytes(parameter)
    return array("Q", data + bytes(-len(data) % WORD_BYTES))


def kind_of_map(tensor_map: TensorMap) -> TensorMap:
    """The map without what changes from call to call."""
    rank = tensor_map.rank
    return replace(tensor_map, address=SOME_ADDRESS, shape=(1,) * rank, strides=(0,) * (rank - 1))
