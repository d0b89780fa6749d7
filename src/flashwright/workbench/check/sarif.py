"""A check's report in SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format), which code hosts display."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flashwright.simulator.errors import ErrorKind
from flashwright.simulator.findings import Finding
from flashwright.version import __version__
from flashwright.workbench.check.launches import CheckReport

SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES: dict[ErrorKind, str] = {
    "out-of-bounds": "An access outside of every allocation.",
    "misaligned": "An address that is no multiple of the access's size.",
    "uninitialised-shared": "A read of shared memory that nobody wrote.",
    "uninitialised-global": "A read of global memory that nobody wrote.",
    "async-copy": "Data of an asynchronous copy that was not waited for.",
    "race": "Two accesses to shared memory, at least one a write, without an order between them.",
    "global-race": "Two accesses to global memory, at least one a write, without an order between them.",
    "unordered-sum": "Additions to one place without an order between them.",
    "proxy-fence": "A missing fence between ordinary and asynchronous accesses.",
    "mbarrier-fence": "An mbarrier's initialisation that the asynchronous proxy may not see.",
    "wgmma": "Registers of a warpgroup product without a wait or a fence.",
    "descriptor": "A matrix descriptor that does not describe a matrix.",
    "tensor-map": "No tensor map, or not one for this copy.",
    "mbarrier": "An mbarrier that is used wrongly.",
    "registers": "setmaxnreg in the wrong direction.",
    "barrier": "A barrier that not all of its threads reach.",
    "deadlock": "Threads that wait for ever, or a loop that does not end.",
    "shared-size": "More shared memory than a thread block can have.",
    "trap": "A trap, or a failed assertion.",
}


def sarif_report(reports: Sequence[CheckReport]) -> dict[str, Any]:
    """What was found in several files, as one run of the tool."""
    rules = [{"id": kind, "shortDescription": {"text": text}} for kind, text in RULES.items()]
    failures = [report.failure for report in reports if report.failure is not None]
    return {
        "$schema": SARIF_SCHEMA,
        "version": SARIF_VERSION,
        "runs": [
            {
                "tool": {"driver": {"name": "flashwright", "semanticVersion": __version__, "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": not failures,
                        "toolExecutionNotifications": [
                            {"level": "error", "message": _message(failure)} for failure in failures
                        ],
                    }
                ],
                "results": [_result(finding, report.target) for report in reports for finding in report.findings],
            }
        ],
    }


def _result(finding: Finding, target: str) -> dict[str, Any]:
    error, other = finding.error, finding.error.other
    result = {
        "ruleId": error.kind,
        "ruleIndex": list(RULES).index(error.kind),
        "level": "warning" if finding.is_warning else "error",
        "message": _message(str(error)),
        "locations": [_location(target, error.source_file, error.source_line, error.ptx_line)],
        "occurrenceCount": finding.count,
        # Line and register numbers move with every edit.
        "partialFingerprints": {
            "finding/v1": _digest(error.kind, error.kernel, (error.instruction or "").split(" ")[0])
        },
    }
    if other is not None:
        place = _location(target, other.source_file, other.source_line, other.ptx_line)
        result["relatedLocations"] = [{"id": 1, "message": _message(str(other)), **place}]
    return result


def _message(text: str) -> dict[str, str]:
    """Plain text, in which braces mark placeholders unless they are doubled (section 3.11.5)."""
    return {"text": text.replace("{", "{{").replace("}", "}}")}


def _location(target: str, file: str | None, line: int | None, ptx_line: int | None) -> dict[str, Any]:
    """In the source, or in the PTX where there is no source."""
    if file is None:
        file, line = target, ptx_line if target.endswith(".ptx") else None
    region = {} if not line else {"region": {"startLine": line}}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(file)}, **region}}


def _uri(file: str) -> str:
    """Relative to the working directory where it can be: that is how code hosts find their files."""
    path = Path(file)
    if path.is_absolute():
        working = Path.cwd()
        if not path.is_relative_to(working):
            return path.as_uri()
        path = path.relative_to(working)
    return quote(path.as_posix())


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
