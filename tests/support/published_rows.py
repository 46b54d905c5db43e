"""Access to the rows of results that the pages show."""

from __future__ import annotations

import csv
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def published(name: str) -> list[dict[str, str]]:
    """Return the rows of a results file, named without its suffix."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))
