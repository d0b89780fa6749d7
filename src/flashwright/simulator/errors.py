"""The one exception of the simulator, with everything a reader needs to find the fault."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

ErrorKind = Literal[
    "out-of-bounds",
    "misaligned",
    "uninitialised-shared",
    "uninitialised-global",
    "async-copy",
    "race",
    "global-race",
    "unordered-sum",
    "proxy-fence",
    "mbarrier-fence",
    "wgmma",
    "descriptor",
    "tensor-map",
    "mbarrier",
    "registers",
    "barrier",
    "deadlock",
    "shared-size",
    "unsupported",
    "trap",
]


@dataclass(frozen=True)
class OtherParty:
    """The second party of a hazard: who touched the memory before, and where in the program.

    ``warp`` is None for a bulk copy, which belongs to no warp once it has been issued. ``thread_block`` is named if it
    may be another than that of the first party; then the lane is not known.
    """

    warp: int | None
    lane: int | None
    access: str
    ptx_line: int
    source_line: int | None
    instruction: str
    source_file: str | None = None
    thread_block: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        source = f", source line {self.source_line}" if self.source_line else ""
        where = f"`{self.instruction}` (PTX line {self.ptx_line}{source})"
        if self.warp is None:
            return f"{self.access}: {where}"
        if self.thread_block is not None:
            return f"{self.access} by thread block {self.thread_block}, warp {self.warp}: {where}"
        lane = "several lanes" if self.lane is None else f"lane {self.lane}"
        return f"{self.access} by warp {self.warp}, {lane}: {where}"


class SimulationError(Exception):
    """A fault of the simulated program: what happened, who did it, and where in PTX and CUDA source.

    ``source_file`` and ``source_line`` are of the innermost inlined function; ``source_location`` is the whole
    chain of call sites. Fields that do not apply to a fault (for example ``lane`` of a deadlock) are None.
    ``findings`` are the hazards that were collected before the fault.
    """

    def __init__(
        self,
        kind: ErrorKind,
        detail: str,
        *,
        kernel: str | None = None,
        thread_block: tuple[int, int, int] | None = None,
        warp: int | None = None,
        lane: int | None = None,
        address: int | None = None,
        ptx_line: int | None = None,
        source_line: int | None = None,
        source_file: str | None = None,
        source_location: str | None = None,
        instruction: str | None = None,
        other: OtherParty | None = None,
    ) -> None:
        self.kind = kind
        self.detail = detail
        self.kernel = kernel
        self.thread_block = thread_block
        self.warp = warp
        self.lane = lane
        self.address = address
        self.ptx_line = ptx_line
        self.source_line = source_line
        self.source_file = source_file
        self.source_location = source_location
        self.instruction = instruction
        self.other = other
        self.findings: list[Any] = []
        super().__init__(self._message())

    def to_dict(self) -> dict[str, Any]:
        """The fields that apply, ready for JSON."""
        names = (
            "kind", "detail", "kernel", "thread_block", "warp", "lane", "address", "ptx_line", "source_file",
            "source_line", "source_location", "instruction",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return values if self.other is None else {**values, "other": asdict(self.other)}

    def _message(self) -> str:
        lines = [f"{self.kind}: {self.detail}"]
        if self.kernel is not None:
            lines.append(f"  kernel: {self.kernel}")
        who = []
        if self.thread_block is not None:
            who.append(f"thread block {self.thread_block}")
        if self.warp is not None:
            who.append(f"warp {self.warp}")
        if self.lane is not None:
            who.append(f"lane {self.lane}")
        if who:
            lines.append("  thread: " + ", ".join(who))
        if self.address is not None:
            lines.append(f"  address: {self.address:#x}")
        if self.instruction is not None:
            lines.append(f"  instruction: `{self.instruction}`")
        if self.ptx_line is not None:
            lines.append(f"  PTX line: {self.ptx_line}")
        if self.source_location is not None:
            lines.append(f"  source: {self.source_location}")
        if self.other is not None:
            lines.append(f"  other: {self.other}")
        return "\n".join(lines)
