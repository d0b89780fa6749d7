"""A check's report for people: one paragraph per place, in the form of compilers, so that editors find it."""

from __future__ import annotations

from flashwright.simulator.findings import Finding
from flashwright.simulator.run import counted
from flashwright.workbench.check.launches import CheckReport


def text_report(report: CheckReport) -> str:
    """What was found in one file."""
    findings = report.findings
    launches = counted(len(report.launches), "launch", "launches")
    paragraphs = [_paragraph(finding, report.target) for finding in findings]
    found = counted(len(findings), "finding") if findings else "nothing found"
    summary = f"{report.target}: {found} in {launches}"
    if report.failure is not None:
        summary = f"{summary}, then not checked" if report.launches else f"{report.target}: not checked"
    return "\n\n".join([*paragraphs, summary])


def _paragraph(finding: Finding, target: str) -> str:
    error = finding.error
    times = "" if finding.count == 1 else f" ({finding.count:,} times)"
    place = _place(target, error.source_file, error.source_line, error.ptx_line)
    warning = "warning: " if finding.is_warning else ""
    lines = [f"{place}: {warning}{error.kind}: {error.detail}{times}"]
    if error.thread_block is not None:
        address = "" if error.address is None else f", address {error.address:#x}"
        lines.append(f"  first in thread block {error.thread_block}, warp {error.warp}, lane {error.lane}{address}")
    if error.instruction is not None:
        lines.append(f"  `{error.instruction}`, PTX line {error.ptx_line}")
    if error.source_location is not None and " (inlined" in error.source_location:
        lines.append(f"  {error.source_location}")
    if error.other is not None:
        other = error.other
        lines.append(f"{_place(target, other.source_file, other.source_line, other.ptx_line)}: note: {other}")
    return "\n".join(lines)


def _place(target: str, file: str | None, line: int | None, ptx_line: int | None) -> str:
    """`file:line` of the source, or of the PTX where there is no source."""
    if file is not None and line is not None:
        return f"{file}:{line}"
    return target if ptx_line is None or not target.endswith(".ptx") else f"{target}:{ptx_line}"
