"""What runs have found so far, so that one client can be run again without the others."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from scenarios import Outcome

Cells = dict[str, dict[str, Outcome]]


def merged(path: Path, found: Mapping[str, Mapping[str, Outcome]]) -> Cells:
    """Rows of a file with these cells in the place of theirs, which it keeps from then on."""
    rows = _read(path)
    for name, cells in found.items():
        rows[name] = rows.get(name, {}) | dict(cells)
    told = {name: {at: asdict(cell) for at, cell in cells.items()} for name, cells in rows.items()}
    path.write_text(json.dumps(told, indent=1))
    return rows


def _read(path: Path) -> Cells:
    known = json.loads(path.read_text()) if path.is_file() else {}
    return {
        name: {at: Outcome(**cell) for at, cell in cells.items()} for name, cells in known.items()
    }
