"""Counts, tables, plots and messages of packed.py, chunked_prefill.py and decode.py, also without a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")


def test_scores_are_those_that_the_mask_keeps(load: Any) -> None:
    packed, prefill = load("packed"), load("chunked_prefill")
    for case in (packed.Case((5, 0, 70), 2, 1), packed.Case((90,), 2, 1, left=20)):
        mask = case.mask(np.cumsum([0, *case.lengths])).toarray(case.tokens)
        assert case.num_scores == mask.sum()
        assert case.flops("backward") == 5 * 2 * 2 * 128 * mask.sum()
    chunk = prefill.Case((7, 9), (3, 9))
    mask = prefill.masks.Sequences.of([3, 9], [7, 9], causal="bottom_right").toarray(12, 16)
    assert chunk.flops == 4 * prefill.HEADS * prefill.HEAD_DIM * mask.sum()


def rows_of(packed: ModuleType) -> list[dict[str, Any]]:
    times = {"cuflash": 1.0, "other": 2.0}
    timings = {name: packed.Timing(ms, 0.1, 5) for name, ms in times.items()}
    groups = [list(packed.rows_of("short", way, timings, {"cuflash": 30.0}, {}, {"gone": "no module"}))
              for way in packed.WAYS]  # fmt: skip
    return [row | {"gpu": "a GPU", "commit": "abcdef0", "date": "2026-01-01"} for rows in groups for row in rows]


def test_a_row_tells_the_ratio_to_the_fastest_other_library(load: Any) -> None:
    packed, tables = load("packed"), load("tables")
    rows = rows_of(packed)
    assert [row["ratio"] for row in rows] == [2.0, None, None] * 2
    assert packed.plot(rows).axes and len(packed.table(rows).rows) == 6
    shown = {name: "" if value is None else str(value) for name, value in rows[0].items()}
    text = tables.packed([shown, shown | {"case": "chunks"}, shown | {"ms": ""}])
    assert "| short | forward | cuflash | 1 |" in text and text.count("cuflash") == 1 and "commit abcdef0" in text
    assert tables.prefill([shown, shown | {"case": "chunks"}]).count("cuflash") == 1
