"""The experiment on selectors: its rows are right for any data, and unknown values of its flags are refused."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def shootout(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("selector_shootout")


def test_every_selector_keeps_as_much_and_none_more_than_the_oracle(shootout: ModuleType) -> None:
    names = ("oracle", "antidiagonal", "vertical_slash", "local")
    config = shootout.Config(data=("columns",), names=names, top_ks=(4,), seqlen=128, block=16, repeats=1)
    rows = {row["selector"]: row for row in shootout.run(config)}
    assert tuple(rows) == names
    for name, row in rows.items():
        assert row["density"] <= rows["oracle"]["density"]
        if name != "vertical_slash":  # its budget is for all rows together, not for each row
            assert row["density"] == rows["oracle"]["density"]
            assert row["recall"] <= rows["oracle"]["recall"] + 1e-6
        assert row["both_ms"] > 0 and row["error"] > 0 and row["gradient_error"] > 0
    (shown,) = shootout.table(list(rows.values())).renderables
    assert shown.row_count == len(rows) and len(shootout.plot(list(rows.values())).axes) == 2


OWN = """
from cuflash import selectors
number = 3
def nearest(q, k, *, block, budget, causal, forced):
    return selectors.local(q, k, block=block, budget=budget, causal=causal, forced=forced)
"""


def test_data_and_selectors_of_ones_own_take_part(
    shootout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "selector_of_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 64, 8), np.float32)
    np.savez("my.npz", q=q, k=k[:, :2], v=v[:, :2])
    names = ("oracle", "local", "selector_of_a_test:nearest")
    for causal in (False, True):
        config = shootout.Config(data=("my.npz",), names=names, top_ks=(2,), block=16, repeats=1, causal=causal)
        rows = {row["selector"]: row for row in shootout.run(config)}
        assert tuple(rows) == names and {row["num_heads"] for row in rows.values()} == {8}
        assert {row["density"] for row in rows.values()} == {7 / 16 if causal else 1 / 2}
        assert rows[names[1]]["recall"] == rows[names[2]]["recall"] < rows["oracle"]["recall"]
    for wrong in ({"names": ("selector_of_a_test:none",)}, {"names": ("selector_of_a_test:number",)}):
        with pytest.raises(ValueError, match="selector_of_a_test"):
            shootout.Config(**wrong)
    with pytest.raises(ValueError, match="none.npz must be an .npz file; the file does not exist"):
        shootout.Config(data=("none.npz",))


def test_all_blocks_have_no_error_and_equal_gradients(shootout: ModuleType) -> None:
    """In float64, a selection of all blocks changes no gradient by more than float32's rounding of the distance.

    Gradients of three times the size have a distance of 2.
    """
    q, k, v, causal = shootout.columns(64, 2)
    heads = *(x.astype(float) for x in (q, k, v)), causal
    index = shootout.selection("local", heads, 16, 4)()
    right = shootout.gradients(heads)
    assert shootout.distance(shootout.gradients(heads, index), right) <= np.finfo(np.float32).eps
    assert shootout.distance([3 * x for x in right], right) == pytest.approx(2)
    zeros = [0 * x for x in right[:2]]
    assert 0 < shootout.distance([*zeros, right[2]], right) < 1


def test_pages_tell_what_a_selector_does_not_beat(shootout: ModuleType) -> None:
    """The test creates the rows: `pooled` leads both baselines; `nsa` equals `local` with 4 blocks and loses with 8."""
    recalls = {"oracle": (0.9, 0.9), "pooled": (0.8, 0.8), "nsa": (0.5, 0.6), "local": (0.5, 0.7), "random": (0.1, 0.2)}
    rows = [
        {"data": "x", "selector": name, "top_k": str(top_k), "seqlen": "64", "block": "16", "recall": str(recall)}
        for name, each in recalls.items() for top_k, recall in zip((4, 8), each)
    ]  # fmt: skip
    table = importlib.import_module("experiment_tables").unbeaten(rows)
    assert table.startswith("64 tokens, blocks of 16: 1 of 2 selectors and data recall more at every budget.")
    (line,) = table.splitlines()[4:]
    assert line == "| x | nsa | 0.5000; local 0.5000 | 0.6000; local 0.7000 |"
    assert importlib.import_module("experiment_tables").shootout(rows).count("\n| x | ") == 5


def test_the_published_rows_are_those_of_the_published_run(shootout: ModuleType) -> None:
    with open(EXPERIMENTS / "results/selector_shootout.csv", newline="") as file:
        rows = [(row["data"], row["selector"], int(row["top_k"])) for row in csv.DictReader(file)]
    config = shootout.Config()
    blocks = [(data, name, k) for data in config.data for name in shootout.SELECTORS for k in config.top_ks]
    pages = [(data, name, 2 * k) for data in config.data for name in shootout.OF_PAGES for k in config.top_ks]
    assert rows == blocks + pages
