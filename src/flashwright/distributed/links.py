"""What connects GPUs, and how fast: what a rank can send while it receives as much."""

from __future__ import annotations

from typing import NamedTuple

ACHIEVED = 0.8
"""Of a link's peak, by messages of megabytes: the assumption of every estimate."""


class Link(NamedTuple):
    name: str
    peak_gbytes_per_s: float
    """Of each GPU, in one direction."""
    latency_s: float

    def seconds(self, sent_bytes: float, messages: int) -> float:
        if not messages:
            return 0.0
        return self.latency_s * messages + sent_bytes / (self.peak_gbytes_per_s * 1e9 * ACHIEVED)


LINKS = {
    link.name: link
    for link in (
        Link("nvlink", 450, 10e-6),  # NVLink 4: H100, H200
        Link("nvlink-a100", 300, 10e-6),  # NVLink 3
        Link("nvlink-h800", 200, 10e-6),
        Link("pcie5", 64, 15e-6),
        Link("ib400", 50, 20e-6),  # a 400 Gbit/s adapter for each GPU
        Link("ib200", 25, 20e-6),
        Link("gloo", 2, 200e-6),  # processes of one machine over TCP
    )
}


def link_named(link: str | Link) -> Link:
    if isinstance(link, Link):
        return link
    if not isinstance(link, str) or link not in LINKS:
        raise ValueError(f"link: {link!r} is not known; allowed: {', '.join(LINKS)}")
    return LINKS[link]
