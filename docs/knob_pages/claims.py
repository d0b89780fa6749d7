"""The tables of the page about the documents' claims."""

from __future__ import annotations

from collections.abc import Sequence

from flashwright.workbench.bench.claims import (
    LEAST_DIFFERENCE,
    Claim,
    ClaimResults,
    Found,
    Pair,
    claims,
    findings,
    spread,
    verdict,
)

from .markdown import table

MEASURED_BY = "PYTHONPATH=src python benchmarks/claims.py benchmarks/results/claims_h200.json"
NOT_MEASURED = f"Not measured yet. On a GPU: `{MEASURED_BY}`, then `make docs`."
_AS_CLAIMED = {True: "as claimed", False: "not as claimed", None: "–"}


def claims_summary(results: ClaimResults | None) -> str:
    """A line per claim."""
    rows = []
    for claim in claims():
        found = None if results is None else findings(results, claim)
        figures = ["–", "not measured yet"] if found is None else [_range(found), verdict(found)]
        rows.append([f"[{claim.title}](#{_anchor(claim)})", claim.statement, *figures])
    lines = table(["claim", "what the documents say", "speed with the knob, relative", "verdict"], rows, 4)
    return f"{lines}\n\n{_conditions(results)}"


def claim_verdicts(results: ClaimResults | None, titles: str) -> str:
    """`TITLE ;; TITLE`: a line per claim, on a knob's page."""
    lines = []
    for claim in (_claim(title.strip()) for title in titles.split(";;")):
        found = [] if results is None else findings(results, claim)
        said = f"{verdict(found)}; {_range(found)} × the speed without" if found else "not measured yet"
        lines.append(f"- [{claim.title}](../claims.md#{_anchor(claim)}): {said}")
    return "\n".join(lines)


def claim_table(results: ClaimResults | None, title: str) -> str:
    """Every condition of one claim, with its figures."""
    claim = _claim(title)
    if results is None:
        return f"{claim.statement}\n\n{NOT_MEASURED}"
    found = findings(results, claim)
    rows = [_row(pair, each) for pair, each in zip(claim.pairs, found, strict=True)]
    header = ["condition", "claimed", "TFLOP/s without", "TFLOP/s with", "relative", "found", "verdict"]
    return f"{claim.statement}\n\n{table(header, rows, 2)}\n\nVerdict: {verdict(found)}."


def _claim(title: str) -> Claim:
    claim = next((claim for claim in claims() if claim.title == title), None)
    if claim is None:
        raise ValueError(f"no claim is called {title!r}; allowed: {'; '.join(each.title for each in claims())}")
    return claim


def _row(pair: Pair, found: Found | str) -> list[str]:
    if isinstance(found, str):
        return [pair.condition, pair.expected.value, "–", "–", "–", found, "–"]
    before, after = found.tflops
    return [
        pair.condition,
        pair.expected.value,
        f"{before:.0f}",
        f"{after:.0f}",
        f"{found.ratio:.3f}",
        found.outcome.value,
        _AS_CLAIMED[found.is_as_claimed],
    ]


def _range(found: Sequence[Found | str]) -> str:
    ratios = [each.ratio for each in found if isinstance(each, Found)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"


def _anchor(claim: Claim) -> str:
    """As GitHub makes it of a heading."""
    return claim.title.lower().replace(" ", "-")


def _conditions(results: ClaimResults | None) -> str:
    if results is None:
        return NOT_MEASURED
    where = results.environment
    versions = ", ".join(f"{name} {where.get(name)}" for name in ("driver", "torch", "nvrtc") if where.get(name))
    return (
        f"{where.get('gpu')}, {str(where.get('date'))[:10]} ({versions}), by `{MEASURED_BY}`: medians of GPU time "
        f"over {where.get('rounds')} turns in random order, all kernels of a problem in one process, 16,384 tokens of "
        "hidden size 2,048, no mask. "
        f"The same kernel timed twice differed by up to {spread(results):.1%}; smaller differences, and those under "
        f"{LEAST_DIFFERENCE:.0%}, count as none."
    )
