"""The experiment on selectors: what its rows say holds on any data, and its flags refuse what they do not know."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def shootout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in (EXPERIMENTS, *EXPERIMENTS.iterdir()):
        if folder.is_dir():
            monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("selector_shootout")


def test_every_selector_keeps_as_much_and_none_more_than_the_oracle(shootout: ModuleType) -> None:
    names = ("oracle", "antidiagonal", "vertical_slash", "local")
    config = shootout.Config(data=("columns",), names=names, top_ks=(4,), seqlen=128, block=16, repeats=1)
    rows = {row["selector"]: row for row in shootout.run(config)}
    assert tuple(rows) == names
    for name, row in rows.items():
        assert row["density"] <= rows["oracle"]["density"]
        if name != "vertical_slash":  # it spends its blocks over all rows, and not as many in each
            assert row["density"] == rows["oracle"]["density"]
            assert row["recall"] <= rows["oracle"]["recall"] + 1e-6
    assert shootout.table(list(rows.values())).row_count == len(rows)


@pytest.mark.parametrize(
    "changes", [{"data": ("x",)}, {"names": ("x",)}, {"top_ks": (0,)}, {"block": 24}, {"seqlen": 8}]
)
def test_what_it_does_not_know_is_refused(shootout: ModuleType, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="|".join(("no x in", "must be"))):
        shootout.Config(**changes)


def test_the_published_rows_are_those_of_the_published_run(shootout: ModuleType) -> None:
    with open(EXPERIMENTS / "results/selector_shootout.csv", newline="") as file:
        rows = [(row["data"], row["selector"], int(row["top_k"])) for row in csv.DictReader(file)]
    config = shootout.Config()
    assert rows == [(data, name, k) for data in config.data for name in config.names for k in config.top_ks]
