"""Tensor maps as the copy engine reads them: 128 bytes whose layout is the driver's secret.

Encoding one by the driver takes longer than a launch, so for the tensors of every new length it is not called again.
Where each bit of an address, a size and a stride goes is found out once, by encoding maps that differ in that bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from flashwright.hardware.tensor_map import Fill, Swizzle, TensorMap
from flashwright.runtime.devices import GPUError, driver_checked, make_context_current

WORDS = 16
"""Of 8 bytes."""
_SIZE_BITS, _STRIDE_BITS, _STRIDE_UNIT = 32, 36, 16
_SOME_ADDRESS = 1 << 20

_SAMPLES = (
    ((128, 4_096, 16, 4, 3), (4_096, 256, 16_777_216, 16)),
    ((72, 12_345, 7, 70_000, 1), (144, 1_777_680, 12_443_760, 0)),
    ((256, 1, 1, 1, 1), (0, 0, 0, 0)),
)
"""Sizes and strides (bytes) of maps to try."""

Encode = Callable[[TensorMap], Sequence[int]]
BitRun = tuple[int, int, int, int]
"""(word, bits to drop, mask of what remains, bits to move it up by) of a stretch of a field's bits."""

RowsPlace = tuple[int, int, int]
"""(word, mask of its other bits, bits to move rows less 1 up by)"""


def encoded_words(tensor_map: TensorMap) -> array[int]:
    """By the CUDA driver: cuTensorMapEncodeTiled. It refuses threads that have no context, whatever GPU's."""
    import torch
    from cuda.bindings import driver

    make_context_current(torch.cuda.current_device())
    swizzle = {
        Swizzle.NONE: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle.B32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle.B64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle.B128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    }[tensor_map.swizzle]
    # The driver's names of element types are NumPy's.
    dtype = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{tensor_map.dtype.name.upper()}")
    fill = {
        Fill.ZERO: driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        Fill.NAN: driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
    }[tensor_map.fill]
    encoded = driver_checked(
        driver.cuTensorMapEncodeTiled(
            dtype,
            tensor_map.rank,
            tensor_map.address,
            [driver.cuuint64_t(size) for size in tensor_map.shape],
            [driver.cuuint64_t(stride) for stride in tensor_map.strides],
            [driver.cuuint32_t(size) for size in tensor_map.box],
            [driver.cuuint32_t(stride) for stride in tensor_map.element_strides],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            fill,
        )
    )
    return array("Q", [int(word) for word in encoded.opaque])


class MapTemplate:
    """Maps of one kind: the same element type, rank, box, swizzle and fill."""

    def __init__(self, kind: TensorMap, encode: Encode = encoded_words) -> None:
        rank = kind.rank
        self._kind, self._encode = kind, encode
        smallest = replace(kind, address=_SOME_ADDRESS, shape=(1,) * rank, strides=(0,) * (rank - 1))
        self.blank = array("Q", encode(smallest))
        """A map of one element at no address."""
        self.address_word = _address_word(smallest, self.blank, encode)
        self.blank[self.address_word] = 0
        self._sizes = [self._runs(smallest, "shape", axis) for axis in range(rank)]
        self._strides = [self._runs(smallest, "strides", axis) for axis in range(rank - 1)]
        self.rows_place: RowsPlace | None = None
        """Of the size of dimension 1, where it has one."""
        self.is_known = None not in (*self._sizes, *self._strides)
        """Whether maps can be written here; otherwise the driver is called for each."""
        if self.is_known:
            self._make_writer()
            self.is_known = self._reproduces_samples()

    def _runs(self, smallest: TensorMap, field: str, axis: int) -> list[BitRun] | None:
        """Where the bits of a size less 1, or of a stride in units of 16 bytes, go; None if each is not one bit."""
        places = []
        base = self._encode(smallest)
        for bit in range(_SIZE_BITS if field == "shape" else _STRIDE_BITS):
            shape, strides = list(smallest.shape), list(smallest.strides)
            if field == "shape":
                shape[axis] = (1 << bit) + 1
            else:
                strides[axis] = _STRIDE_UNIT << bit
            words = self._encode(replace(smallest, shape=tuple(shape), strides=tuple(strides)))
            changed = [(i, old ^ new) for i, (old, new) in enumerate(zip(base, words, strict=True)) if old != new]
            if len(changed) != 1 or changed[0][1].bit_count() != 1:
                return None
            places.append((changed[0][0], changed[0][1].bit_length() - 1))
        return _as_runs(places)

    def _reproduces_samples(self) -> bool:
        """Whether maps that differ in many bits come out as the driver encodes them."""
        rank = self._kind.rank
        for shape, strides in _SAMPLES:
            sample = replace(self._kind, address=_SOME_ADDRESS, shape=shape[:rank], strides=strides[: rank - 1])
            words = self.blank[:]
            words[self._begin : self._end] = array("Q", self._varying(*sample.shape, *sample.strides))
            words[self.address_word] = _SOME_ADDRESS
            if words != array("Q", self._encode(sample)):
                return False
        return True

    def write(self, words: array[int], first: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        """Writes sizes and strides (bytes), innermost first, over a map that began as `blank`; the caller fills in its
        address."""
        if self.is_known:
            words[first + self._begin : first + self._end] = array("Q", self._varying(*shape, *strides))
        else:
            whole = replace(self._kind, address=_SOME_ADDRESS, shape=tuple(shape), strides=tuple(strides))
            words[first : first + WORDS] = array("Q", self._encode(whole))

    def _make_writer(self) -> None:
        """Makes the function that gives the words of a map that sizes and strides change.

        Its text is put together here, for a loop over the stretches of bits would take longer than a launch.
        """
        terms: dict[int, list[str]] = {}
        names = [f"size_{axis}" for axis in range(len(self._sizes))]
        names += [f"stride_{axis}" for axis in range(len(self._strides))]
        for name, runs in zip(names, (*self._sizes, *self._strides), strict=True):
            value = f"({name} - 1)" if name.startswith("size") else f"({name} // {_STRIDE_UNIT})"
            left = len(runs or ())
            for word, drop, mask, up in runs or ():
                left -= 1
                stretch = f"({value} >> {drop})" if drop else value
                if left:  # there are bits above
                    stretch = f"({stretch} & {mask})"
                terms.setdefault(word, []).append(f"{stretch} << {up}" if up else stretch)
        self._begin, self._end = min(terms), max(terms) + 1
        words = (" | ".join([str(self.blank[index]), *terms.get(index, [])]) for index in range(self._begin, self._end))
        self._varying = eval(f"lambda {', '.join(names)}: ({', '.join(words)},)")
        rows = self._sizes[1] if len(self._sizes) > 1 else None
        if rows is not None and len(rows) == 1:
            word, _, mask, up = rows[0]
            self.rows_place = (word, (1 << 64) - 1 ^ mask << up, up)


def _address_word(tensor_map: TensorMap, words: Sequence[int], encode: Encode) -> int:
    moved = encode(replace(tensor_map, address=tensor_map.address ^ (1 << 24)))
    places = [i for i, (old, new) in enumerate(zip(words, moved, strict=True)) if old != new]
    if len(places) != 1 or words[places[0]] != tensor_map.address:
        raise GPUError("this driver encodes tensor maps in a way that is not known; use an Ampere-family config")
    return places[0]


def _as_runs(places: list[tuple[int, int]]) -> list[BitRun]:
    """Consecutive bits that go to consecutive places of one word move together."""
    runs: list[BitRun] = []
    first = 0
    for bit in range(1, len(places) + 1):
        word, place = places[first]
        if bit < len(places) and places[bit] == (word, place + bit - first):
            continue
        runs.append((word, first, (1 << (bit - first)) - 1, place))
        first = bit
    return runs


@lru_cache(maxsize=256)
def map_template(kind: TensorMap) -> MapTemplate:
    """The template of maps like this one, whatever its address, sizes and strides."""
    return MapTemplate(kind)


def common_rows_place(maps: Sequence[MapTemplate]) -> RowsPlace | None:
    """Where the rows of maps are, if all have them in the same place."""
    places = {each.rows_place if each.is_known else None for each in maps}
    return places.pop() if len(places) == 1 else None
