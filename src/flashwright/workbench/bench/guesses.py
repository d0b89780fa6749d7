"""How often references follow the scores: a model of the softmax that guesses and of the one that rescales lazily.

A warpgroup of the Hopper kernel, or a warp of the Ampere kernel, visits blocks of keys from the last to the first; the
first block may lead them in the Hopper kernel. The model follows the references and the sums of its rows, in float64,
by the kernels' rules (guessing_softmax.cuh, softmax.cuh); it computes no output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashwright.kernels.forward.hopper import shapes
from flashwright.kernels.forward.hopper.config import WARPGROUP_ROWS
from flashwright.problem.dtypes import DType

LANES = 4
"""That share a row: each has two neighbouring columns of every eight."""
MOST = {DType.BF16: 2.0**40, DType.FP16: 2.0**6}
OVERFLOWING = {DType.BF16: 2.0**96, DType.FP16: 2.0**15}
HEADROOM = {DType.BF16: 24, DType.FP16: 0}
PEAK_RATIO = 16.0
LOG2_MOST_LAZY = {DType.BF16: 40.0, DType.FP16: 15.0}
LOG2_HEADROOM_LAZY = {DType.BF16: 60.0, DType.FP16: 0.0}


@dataclass
class Guesses:
    """Steps of warpgroups, by what became of them. Steps in which a row is in its first keys guess nothing."""

    steps: int = 0
    """Without care, and with care because exponentials overflowed before."""
    lifted: int = 0
    """In which the reference of some row was lifted."""
    overflowed: int = 0
    """Whose scores were computed twice."""
    corrected: int = 0
    """Without care, in which a key may dominate some thread's part of a row: it looks for its largest exponential."""
    with_care: int = 0
    """That searched for maxima because an earlier step of the tile overflowed."""

    def add(self, other: Guesses) -> None:
        self.steps += other.steps
        self.lifted += other.lifted
        self.overflowed += other.overflowed
        self.corrected += other.corrected
        self.with_care += other.with_care


def guesses(
    scores: np.ndarray, dtype: DType, block_keys: int, *, first_leads: bool, shares_dominance: bool = False
) -> Guesses:
    """Of (rows, keys) scores in units of the exponent of 2, minus infinity where a row does not attend; and of threads
    that tell each other, or do not, that a key dominates their row."""
    found = Guesses()
    for first in range(0, len(scores), WARPGROUP_ROWS):
        rows = scores[first : first + WARPGROUP_ROWS]
        found.add(_of_warpgroup(rows, dtype, block_keys, first_leads, shares_dominance))
    return found


def _of_warpgroup(
    scores: np.ndarray, dtype: DType, block_keys: int, first_leads: bool, shares_dominance: bool
) -> Guesses:
    rows, keys = scores.shape
    attends = np.isfinite(scores)
    last_key = np.where(attends.any(axis=1), keys - 1 - attends[:, ::-1].argmax(axis=1), -1)
    blocks_with_care = shapes.blocks_with_care(block_keys, first_leads=first_leads)
    from_the_last = range((keys - 1) // block_keys, -1, -1)
    reference, sums, largest_part = np.full(rows, -np.inf), np.zeros((rows, LANES)), np.zeros(rows)
    found, overflowed = Guesses(), False
    for block in (0, *from_the_last[:-1]) if first_leads else from_the_last:
        part = scores[:, block * block_keys : (block + 1) * block_keys]
        if not np.isfinite(part).any():
            continue
        in_first_blocks = (first_leads and block == 0) | ((block + blocks_with_care) * block_keys > last_key)
        exponentials = _exponentials(part, reference)
        guessed = not in_first_blocks.any()
        found.steps += guessed
        if guessed and overflowed:
            found.with_care += 1
        elif guessed and (_lane_sums(exponentials) >= OVERFLOWING[dtype]).any():
            overflowed = True
            found.overflowed += 1
        if overflowed or not guessed:
            raises = (in_first_blocks & (part.max(axis=1) > reference)) | (
                exponentials.max(axis=1) >= OVERFLOWING[dtype]
            )
            raised = np.where(raises, part.max(axis=1), reference)
            shrinks = _power(reference - raised)
            sums, largest_part = sums * shrinks[:, None], largest_part * shrinks
            reference = raised
        exponentials = _exponentials(part, reference)
        step_sums = _lane_sums(exponentials)
        corrects = (step_sums > 2 * np.maximum(sums, largest_part[:, None])) & _has_peak(exponentials)
        found.corrected += guessed and not overflowed and bool(corrects.any())
        sums += step_sums
        largest = sums.max(axis=1)
        learns = shares_dominance & in_first_blocks & corrects.any(axis=1)
        largest_part = np.where(learns, largest, largest_part)
        lifts = largest > MOST[dtype]
        found.lifted += guessed and bool(lifts.any())
        by = np.where(lifts, np.floor(np.log2(np.maximum(largest, 1))) + HEADROOM[dtype], 0)
        sums, largest_part, reference = sums * _power(-by)[:, None], largest_part * _power(-by), reference + by
    return found


@dataclass
class Rescales:
    """Steps of warps whose rows all have a reference, and those in which O is rescaled."""

    steps: int = 0
    rescaled: int = 0

    def add(self, other: Rescales) -> None:
        self.steps += other.steps
        self.rescaled += other.rescaled


def rescales(scores: np.ndarray, dtype: DType, block_keys: int, warp_rows: int) -> Rescales:
    """The same of the lazy softmax whose sums are of rounded exponentials, which no key dominates."""
    found = Rescales()
    for first in range(0, len(scores), warp_rows):
        found.add(_rescales_of_warp(scores[first : first + warp_rows], dtype, block_keys))
    return found


def _rescales_of_warp(scores: np.ndarray, dtype: DType, block_keys: int) -> Rescales:
    rows, keys = scores.shape
    reference, found = np.full(rows, -np.inf), Rescales()
    for block in range((keys - 1) // block_keys, -1, -1):
        maxima = scores[:, block * block_keys : (block + 1) * block_keys].max(axis=1)
        has_reference = np.isfinite(reference)
        with np.errstate(invalid="ignore"):
            grows = maxima - reference > LOG2_MOST_LAZY[dtype]
        if has_reference.all():
            found.steps += 1
            found.rescaled += bool(grows.any())
        headroom = np.where(has_reference, LOG2_HEADROOM_LAZY[dtype], 0.0)
        reference = np.where(grows, maxima + headroom, reference)
    return found


def _exponentials(part: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return _power(part - np.where(np.isfinite(reference), reference, 0)[:, None])


def _power(exponents: np.ndarray) -> np.ndarray:
    """Of 2; infinite where fp32 is, and one for the difference of two infinities."""
    exponents = np.nan_to_num(exponents, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return np.where(exponents >= 128, np.inf, np.exp2(np.minimum(exponents, 127.0)))


def _has_peak(exponentials: np.ndarray) -> np.ndarray:
    """By lane: whether even or odd tiles of eight keys have nearly all of a step's sum."""
    tiles = exponentials.reshape(len(exponentials), -1, LANES * 2)
    even, odd = (_lane_sums(tiles[:, first::2].reshape(len(exponentials), -1)) for first in (0, 1))
    peak: np.ndarray = (even > PEAK_RATIO * odd) | (odd > PEAK_RATIO * even)
    return peak


def _lane_sums(exponentials: np.ndarray) -> np.ndarray:
    rows, columns = exponentials.shape
    whole = np.zeros((rows, -(-columns // 8) * 8))
    whole[:, :columns] = exponentials
    sums: np.ndarray = whole.reshape(rows, -1, LANES, 2).sum(axis=(1, 3))
    return sums
