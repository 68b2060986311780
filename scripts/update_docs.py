#!/usr/bin/env python3
"""Write committed results into README.md and docs/*.md, so that every number there comes from a file.

    <!-- table: NAME -->    replaced whenever this runs    <!-- /table -->
    at most <!-- num: NAME -->1.23<!-- /num --> x the target

NAME of a table (or of the plot) is one of TABLES, of a number one of NUMBERS. With --check nothing is written, and the
exit code is 1 if a document is not what this would make of it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from documents import decode, development, studies, vllm_runs  # noqa: E402
from documents.common import MISSING, RESULTS, Entries, StaleDocument  # noqa: E402

from mjolnir.bench.results import Report  # noqa: E402

MODULES = (decode, studies, vllm_runs, development)
TABLES: Entries = {name: entry for module in MODULES for name, entry in module.TABLES.items()}
NUMBERS: Entries = {name: entry for module in MODULES for name, entry in module.NUMBERS.items()}

REGION = re.compile(r"(<!-- (table|num): ([\w.-]+) -->)(.*?)(<!-- /\2 -->)", re.DOTALL)
MARKER = re.compile(r"<!-- /?(?:table|num)\b")


def _load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


LOADERS: dict[str, Callable[[Path], Any]] = {"decode.json": Report.load, "bandwidth.svg": lambda path: path}
"""Of files that are not read as plain JSON."""


def render(kind: str, name: str, results: Path) -> str:
    """What stands between the markers.

    Raises:
        StaleDocument: no such table or number.
    """
    known = TABLES if kind == "table" else NUMBERS
    if name not in known:
        raise StaleDocument(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    file, make = known[name]
    path = results / file
    body = make(LOADERS.get(file, _load_json)(path)) if path.exists() else MISSING
    return f"\n\n{body}\n\n" if kind == "table" else body


def update(text: str, results: Path) -> str:
    """The document with every marked region made anew.

    Raises:
        StaleDocument: a marker without its partner, or of an unknown name.
    """
    regions = list(REGION.finditer(text))
    if any(MARKER.search(region[4]) for region in regions) or 2 * len(regions) != len(MARKER.findall(text)):
        raise StaleDocument("table and num markers must come in pairs: <!-- table: NAME --> … <!-- /table -->")
    return REGION.sub(lambda region: region[1] + render(region[2], region[3], results) + region[5], text)


def documents_of(root: Path) -> list[Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write committed results into README.md and docs/*.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a document is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args(arguments)
    stale = False
    for path in documents_of(options.root):
        text = path.read_text(encoding="utf-8")
        try:
            updated = update(text, options.root / RESULTS)
        except StaleDocument as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 1
        if updated == text:
            continue
        stale = True
        if options.check:
            print(f"{path.name} is stale: run scripts/update_docs.py", file=sys.stderr)
        else:
            path.write_text(updated, encoding="utf-8")
            print(f"{path.name} updated")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
