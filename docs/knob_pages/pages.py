"""Filling the pages: where they are, what they are made of, and whether they are up to date."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.best_peers import best_over_common
from flashwright.workbench.bench.claims import read_claims
from flashwright.workbench.bench.knob_effects import bases, configs_of, read_knob_effects
from flashwright.workbench.bench.result_files import write_atomically
from flashwright.workbench.bench.results import read_result
from flashwright.workbench.ladder import read_ladder

from .accuracy import read_errors
from .blocks import filled
from .code_blocks import with_outputs
from .distributed import distributed_pictures, read_distributed
from .kernel_facts import FactsFile, gather, gather_facts, read_facts, write_facts
from .knobs import AMPERE, HOPPER, ORDER_KNOBS, KnobSet, values_of
from .measured import read_ampere_grid
from .pictures import hopper_pictures, pictures
from .tables import Inputs, renderers

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")
FACTS, LADDER, EFFECTS, BENCH = (
    RESULTS / name for name in ("knob_facts.json", "ladder_h200.json", "knob_effects_h200.json", "bench_h200_bf16.json")
)
HOPPER_FACTS = RESULTS / "hopper_knob_facts.json"
ERRORS = RESULTS / "simulated_errors.json"
SCORES = {family: RESULTS / f"scores_{family}_h200_bf16.json" for family in ("hopper", "ampere")}
PEERS = RESULTS / "peers_h200.json"
HOPPER_LADDER = RESULTS / "ladder_hopper_h200.json"
BACKWARD_LADDERS = {family: RESULTS / f"ladder_backward_{family}_h200.json" for family in ("ampere", "hopper")}
AMPERE_GRIDS = {
    "BF16": SCORES["ampere"],
    "FP16": RESULTS / "ampere_h200_fp16.json",
    "BF16, gradients": RESULTS / "backward_ampere_h200_bf16.json",
}
CLAIMS = RESULTS / "claims_h200.json"
DISTRIBUTED = RESULTS / "distributed_h200.json"
INDEX = Path("docs/README.md")
PICTURES, HOPPER_PICTURES = (of.folder / "pictures" for of in (AMPERE, HOPPER))
DISTRIBUTED_PICTURES = Path("docs/pictures")
TUTORIAL = Path("docs/tutorial.md")
DIAGNOSING = AMPERE.folder / "diagnosing.md"
SIMULATOR = Path("docs/simulator.md")
OTHER_PAGES = (
    *map(Path, ("README.md", "docs/performance.md", "docs/claims.md", "docs/accuracy.md", "docs/distributed.md")),
    INDEX,
    DIAGNOSING,
    SIMULATOR,
)


def read_inputs(root: Path = ROOT) -> Inputs:
    """The committed results; raises an error for a file that is missing, but for the measurements of a GPU."""
    effects = read_knob_effects(root / EFFECTS) if (root / EFFECTS).exists() else None
    return Inputs(
        root,
        read_facts(root / FACTS),
        read_ladder(root / LADDER),
        effects,
        read_result(root / BENCH),
        {family: read_result(root / path) for family, path in SCORES.items()},
        best_over_common(root / PEERS),
        read_ladder(root / HOPPER_LADDER),
        {family: read_ladder(root / path) for family, path in BACKWARD_LADDERS.items()},
        {dtype: read_ampere_grid(root / path) for dtype, path in AMPERE_GRIDS.items()},
        read_claims(root / CLAIMS) if (root / CLAIMS).exists() else None,
        read_facts(root / HOPPER_FACTS),
        read_errors(root / ERRORS),
        read_distributed(root / DISTRIBUTED),
    )


def page_paths() -> dict[Path, tuple[KnobSet, str | None]]:
    """Every generated page, and the knob that it is about."""
    pages: dict[Path, tuple[KnobSet, str | None]] = dict.fromkeys(OTHER_PAGES, (AMPERE, None))
    return pages | {of.folder / f"{knob}.md": (of, knob) for of in (AMPERE, HOPPER) for knob in of.meanings}


def filled_pages(inputs: Inputs) -> Mapping[Path, str]:
    """What every page should say."""
    pages = {}
    for path, (of, knob) in page_paths().items():
        try:
            pages[path] = filled((inputs.root / path).read_text("utf-8"), renderers(inputs, knob, of))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return pages


def write_tutorial(root: Path = ROOT) -> bool:
    """Executes the tutorial's blocks and writes what they print below them; whether anything changed."""
    path = root / TUTORIAL
    text = path.read_text("utf-8")
    executed = with_outputs(text, str(TUTORIAL))
    if executed != text:
        write_atomically(path, executed.encode())
    return executed != text


def stale_pages(inputs: Inputs) -> list[Path]:
    """Pages that say something else than what they should."""
    return [path for path, text in filled_pages(inputs).items() if (inputs.root / path).read_text("utf-8") != text]


def write_pages(inputs: Inputs) -> list[Path]:
    """Fills every page; returns those that changed."""
    changed = stale_pages(inputs)
    for path, text in filled_pages(inputs).items():
        if path in changed:
            write_atomically(inputs.root / path, text.encode())
    return changed


def make_facts(root: Path = ROOT, *, progress: bool = True) -> FactsFile:
    """Compiles and simulates all kernels of the pages, and keeps what was found."""
    ordered = {value.config for knob in ORDER_KNOBS for value in values_of(knob) if value.config is not None}
    facts = gather(configs_of(bases()), ordered, progress=progress)
    write_facts(root / FACTS, facts)
    write_facts(
        root / HOPPER_FACTS, gather_facts(configs_of(HOPPER.bases()), HOPPER.arch, HOPPER.keys, progress=progress)
    )
    return facts


def draw_pictures(facts: FactsFile, root: Path = ROOT, *, progress: bool = True) -> None:
    """Draws every picture, and removes those that no page has any more."""
    drawings = {PICTURES / name: draw for name, draw in pictures(facts).items()}
    drawings |= {HOPPER_PICTURES / name: draw for name, draw in hopper_pictures().items()}
    drawings |= {DISTRIBUTED_PICTURES / name: draw for name, draw in distributed_pictures().items()}
    with progress_bar("drawing", len(drawings), enabled=progress) as advance:
        for path, draw in drawings.items():
            (root / path).parent.mkdir(exist_ok=True)
            write_atomically(root / path, draw().encode())
            advance()
    for folder in (PICTURES, HOPPER_PICTURES, DISTRIBUTED_PICTURES):
        for path in (root / folder).glob("*.svg"):
            if folder / path.name not in drawings:
                path.unlink()
