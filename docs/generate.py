"""Fills README.md and the pages in docs with numbers and pictures. No GPU is needed.

make docs                                      all of it: compiles, simulates, draws, fills (minutes)
.venv/bin/python docs/generate.py --pages      fills the pages from the committed result files (a second)
.venv/bin/python docs/generate.py --check      reports which pages are not up to date, and changes nothing
"""

from __future__ import annotations

import argparse
import sys

from knob_pages.pages import (
    CLAIMS,
    EFFECTS,
    TUTORIAL,
    draw_pictures,
    make_facts,
    read_inputs,
    stale_pages,
    write_pages,
    write_tutorial,
)
from knob_pages.tables import failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pages", action="store_true", help="only fill the pages")
    which.add_argument("--check", action="store_true", help="only report which pages are not up to date")
    options = parser.parse_args()
    if not (options.pages or options.check):
        draw_pictures(make_facts())
        if write_tutorial():
            print(f"changed: {TUTORIAL}")
    inputs = read_inputs()
    if inputs.effects is None:
        print(f"{EFFECTS} does not exist: the pages say that times have not been measured yet")
    if inputs.claims is None:
        print(f"{CLAIMS} does not exist: the page of claims says that they have not been measured yet")
    for name, reason in failures(inputs).items():
        print(f"not measured: {name}: {reason}")
    if options.check:
        stale = stale_pages(inputs)
        print("\n".join(f"not up to date: {path}" for path in stale) or "all pages are up to date")
        return 1 if stale else 0
    print("\n".join(f"changed: {path}" for path in write_pages(inputs)) or "all pages were up to date")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
