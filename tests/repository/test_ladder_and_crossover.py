"""The ladder of kernels and the crossover of block sizes at tiny sizes: rows, memory, and refused arguments."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from published_rows import published

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


# The ladder


def test_memory_of_plain_attention_is_matrices_and_that_of_tiles_is_not(load) -> None:
    ladder = load("flash_ladder")
    config = ladder.Config(seqlens=(1024, 64), num_heads=1, head_dim=16, repeats=1)
    rows = list(ladder.run(config))
    cases = itertools.product((64, 1024), ladder.MASKS, ("plain", "cpu"), ladder.WAYS)
    assert [(row["seqlen"], row["mask"], row["kernel"], row["pass"]) for row in rows] == list(cases)
    for row in rows:
        matrix = 4 * row["seqlen"] ** 2 / 2**20
        assert row["ms"] > 0 and row["tflops"] > 0
        if row["kernel"] == "plain":
            assert row["workspace_mib"] is None
            assert row["peak_mib"] >= matrix * {"forward": 1, "backward": 2}[row["pass"]]
    tiled, plain = ({row["seqlen"]: row["peak_mib"] for row in rows if row["kernel"] == x} for x in ("cpu", "plain"))
    assert tiled[1024] < plain[1024] / 2
    assert len(ladder.table(rows).rows) == len(rows) and len(ladder.plot(rows).axes) == 8


def test_a_kernel_with_wrong_results_is_not_timed(load) -> None:
    ladder, spot_check, masks = load("flash_ladder"), load("spot_check"), load("cuflash.masks")
    arrays = ladder.draw(ladder.Config(num_heads=2, head_dim=8), 40)
    check = spot_check.SpotCheck.of(*arrays[:3], masks.Causal())
    assert set(ladder.checked("plain", ladder.Plain(True), arrays, check)) == set(ladder.WAYS)
    with pytest.raises(RuntimeError, match="plain is wrong by .* and is not timed"):
        ladder.checked("plain", ladder.Plain(False), arrays, check)


# The crossover


def test_a_crossover_lies_where_the_line_between_two_densities_meets_the_dense_time(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test sets the times: 2 * density for blocks of 32, 0.9 * density for 64, and more than dense for 128."""
    crossover, timing = load("crossover"), load("harness").Timing
    slopes = {32: 2.0, 64: 0.9, 128: 9.0}

    def timed(config, arrays, block: int) -> dict:
        both = itertools.product(config.densities, crossover.WAYS)
        sparse = {f"{density} {way}": timing(10 * slopes[block] * density, 0.0, 1) for density, way in both}
        return sparse | {f"dense {way}": timing(10.0, 0.0, 1) for way in crossover.WAYS}

    monkeypatch.setattr(crossover, "timed", timed)
    rows = list(crossover.run(crossover.Config(seqlens=(1024,), densities=(0.125, 0.25, 0.75, 1.0))))
    assert {row["block"]: row["crossover"] for row in rows} == {32: pytest.approx(0.5), 64: 1.0, 128: None}
    assert all(row["of_dense"] == pytest.approx(slopes[row["block"]] * row["density"]) for row in rows)
    assert len(rows) == 3 * 2 * 4 and len(crossover.plot(rows).axes) == 2
    crossover.table(rows)


# Both


def test_the_published_rows_are_those_of_the_published_runs(load) -> None:
    ladder, crossover = load("flash_ladder").Config(), load("crossover").Config()
    rows = [(row["seqlen"], row["mask"], row["kernel"], row["pass"]) for row in published("flash_ladder")]
    ways = ("forward", "backward")
    assert rows == list(itertools.product(map(str, ladder.seqlens), ladder.masks, ("plain", "cpu"), ways))
    cases = [(row["seqlen"], row["block"], row["pass"], float(row["density"])) for row in published("crossover")]
    sizes = (map(str, crossover.seqlens), map(str, crossover.blocks))
    assert cases == list(itertools.product(*sizes, ways, crossover.densities))
