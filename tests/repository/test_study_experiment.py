"""The study as an experiment: its rows equal those of the command, and data that it cannot read is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cuflash import UnsupportedProblem
from cuflash.study.survey import Measurement, Survey

Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 48, 8))


@pytest.fixture
def study(load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    np.savez("my.npz", q=Q, k=K, v=V)
    np.savez("swapped.npz", **{name: x.swapaxes(0, 1) for name, x in zip("qkv", (Q, K, V))})
    np.savez("near.npz", np.eye(6, dtype=bool))
    return load("study")


def test_its_rows_are_those_of_a_survey(study: ModuleType) -> None:
    names = ("window", "bigbird", "near.npz")
    config = study.Config(archive="my.npz", patterns=names, blocks=(8,), densities=(0.5, 0.15), causal=True)
    rows = {(row["pattern"], row["at_most"]): row for row in study.run(config)}
    assert set(rows) == {(name, limit) for name in names for limit in (0.15, 0.5)}
    measured = Survey(Q, K, V, causal=True, scale=None).measurements([8], ["window", "bigbird"], [0.15, 0.5])
    for measurement in measured:
        row = rows[measurement.pattern, measurement.at_most]
        if isinstance(measurement, Measurement):
            assert {name: row[name] for name in measurement._fields} == measurement._asdict()
        else:
            assert row["recall"] is None and row["density"] > row["at_most"]
    assert rows["near.npz", 0.5]["density"] == 6 / 21 and rows["near.npz", 0.15]["recall"] is None
    assert {row["read_as"] for row in rows.values()} == {"2 heads, 48 tokens, 8 dims"}
    assert study.table(list(rows.values())).row_count == 3


def test_what_it_cannot_read_is_refused(study: ModuleType) -> None:
    patterns = ("x",), ("no_module_of_ours:x",)
    for changes in ({"archive": "none.npz"}, {"densities": (2.0,)}, *({"patterns": each} for each in patterns)):
        with pytest.raises(ValueError, match="must|no x in"):
            study.Config(**changes)
    with pytest.raises(UnsupportedProblem, match="was read as 48 heads, 2 tokens, 8 dims: swap axes, or nothing fits"):
        list(study.run(study.Config(archive="swapped.npz")))
