"""The cost model against figures that others measured: ring-flash-attention's table.

Each of eight GPUs has 8192 rows of Llama-3.1-8B's heads, causal, bf16, without packing. Speeds of one GPU are the
table's own ("theoretic flash_attn"), so the model has to find what is lost by sharing. Its partial results are merged
by PyTorch's elementwise operations, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

from flashwright.distributed.cost import BACKWARD_WORK, Machine, Sizes, Strategy, cost_of
from flashwright.distributed.layouts import holdings
from flashwright.distributed.links import link_named
from flashwright.distributed.rounds import RING
from flashwright.distributed.visibility import Mask
from flashwright.problem.window import Window

SOURCE = "https://github.com/zhuzilin/ring-flash-attention at 01c8baf, batch API"
ROWS, RANKS = 8192, 8
SIZES = Sizes(batch=1, q_heads=32, kv_heads=8, head_dim=128)
UNFUSED_MERGE_BYTES = 38
"""Widening (2 + 4), a difference (3 · 4), a product (2 · 4), a difference (3 · 4)."""
UNFUSED_ADDING_BYTES = 10
"""A gradient is read (2), and added to the sum (4 + 4)."""


class PublishedGPU(NamedTuple):
    name: str
    link: str
    memory_bytes_per_s: float
    forwards_per_s: float
    """Of 8192 rows on one GPU."""
    trainings_per_s: float
    """Forward and backward of the same."""

    @property
    def machine(self) -> Machine:
        work = 4 * SIZES.q_heads * SIZES.head_dim * ROWS * (ROWS + 1) / 2
        backward_s = 1 / self.trainings_per_s - 1 / self.forwards_per_s
        return Machine(
            work * self.forwards_per_s, BACKWARD_WORK * work / backward_s, self.memory_bytes_per_s, UNFUSED_MERGE_BYTES,
            UNFUSED_ADDING_BYTES,
        )  # fmt: skip


class PublishedFigure(NamedTuple):
    gpu: PublishedGPU
    layout: str
    forward: float
    """The fraction of one GPU's speed that each of eight reached."""
    training: float


H800 = PublishedGPU("8 × H800", "nvlink-h800", 3.35e12, 591.5, 154.7)
A100 = PublishedGPU("8 × A100", "nvlink-a100", 2.0e12, 373.4, 94.7)
FIGURES = (
    PublishedFigure(H800, "contiguous", 0.521, 0.539),
    PublishedFigure(H800, "zigzag", 0.852, 0.902),
    PublishedFigure(A100, "contiguous", 0.514, 0.525),
    PublishedFigure(A100, "zigzag", 0.817, 0.898),
)


class Comparison(NamedTuple):
    figure: PublishedFigure
    operation: str
    published: float
    modelled: float

    @property
    def off(self) -> float:
        return self.modelled - self.published


def comparisons() -> list[Comparison]:
    found = []
    for figure in FIGURES:
        by_rank = holdings(figure.layout, ROWS * RANKS, RANKS)
        mask = Mask(Window(None, 0), (0, ROWS * RANKS), (0, ROWS * RANKS))
        cost = cost_of(
            Strategy(RING, RANKS, 1), by_rank, by_rank, mask, SIZES, figure.gpu.machine, link_named(figure.gpu.link)
        )
        # The table compares with 8192 rows on one GPU, eight times: as much work as an eighth of the whole.
        found.append(Comparison(figure, "forward", figure.forward, cost.forward_efficiency))
        found.append(Comparison(figure, "forward + backward", figure.training, cost.efficiency))
    return found
