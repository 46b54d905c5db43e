"""The ledger of examples with tangents: it adds up, and each of its properties detects a wrong derivative."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")


@pytest.fixture
def sweep(load) -> ModuleType:
    return load("tangent_sweep")


def test_the_ledger_adds_up_over_runs(sweep: ModuleType, tmp_path: Path) -> None:
    path, config = tmp_path / "tangent_sweep.csv", sweep.Config(dtypes=("float32",), size=12, seconds=30)
    for number in (1, 2):
        row = next(iter(sweep.run(config, path)))
        assert row["batches"] == number and row["structures"] >= 12 * number
        assert row["examples"] == sweep.DIRECTIONS * row["structures"] and row["outside"] == 0
        assert 0 < row["dq_dot"] <= 1 and 0 < row["symmetry"] <= 1 and row["worst"].startswith("Moving(")
    assert sweep.table([row]).row_count == 1


def largest(sweep: ModuleType) -> dict[str, float]:
    """Return the largest quotient of each property of a batch."""
    row = sweep.draw("float32", 0, 12)
    return {name: row[name] for name in sweep.PROPERTIES}


@pytest.mark.parametrize("name", ["jvp", "backward_jvp"])
def test_every_property_detects_wrong_results_of_a_pass(
    sweep: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = getattr(sweep.cuflash.Plan, name)

    def wrong(*args: Any, **options: Any) -> Any:
        results = method(*args, **options)
        first = results[0] if isinstance(results, tuple) else results.dq
        if first.size:
            first += np.float32(0.5)
        return results

    monkeypatch.setattr(sweep.cuflash.Plan, name, wrong)
    outside = {key for key, share in largest(sweep).items() if share > 1}
    assert outside >= ({"o_dot", "duality", "symmetry"} if name == "jvp" else {"dq_dot", "symmetry"})


def test_duality_detects_a_wrong_gradient(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sweep.cuflash.attention_hvp

    def wrong(*args: Any, **options: Any) -> Any:
        results, gradients, dots = right(*args, **options)
        gradients.dk[...] *= 1.01
        return results, gradients, dots

    monkeypatch.setattr(sweep.cuflash, "attention_hvp", wrong)
    shares = largest(sweep)
    assert {name for name, share in shares.items() if share > 1} == {"duality"}
