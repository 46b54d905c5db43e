"""The experiments at tiny sizes, the files that they write, and the activations that they read."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cuflash
import cupy_machine
import numpy as np
import pytest
from cuflash import masks, testing
from cuflash.masks.content import held_arrays

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
ARCHIVE = EXPERIMENTS / "data" / "minilm_activations.npz"


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


# Files


def test_an_exception_leaves_the_old_file_and_nothing_else(harness: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "result.csv"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), harness.atomic_path(path) as partial:
        partial.write_text("half of the n")
        raise KeyboardInterrupt
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.csv", "old")]


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


# Timing


def test_calls_are_timed_in_turn(harness: ModuleType) -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = harness.time_alternately(calls, repeats=3, warmup=1)
    assert "".join(order) == "ab" * 4
    assert all(timing.repeats == 3 and timing.median_ms >= 0 <= timing.spread_ms for timing in times.values())


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
    speed = [row for row in records if row["part"] == "speed"]
    assert {row["pattern"] for row in speed} == set(config.speed_patterns)
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in speed)
    assert len(experiment.plot(records).axes) == 2


# The correctness run on a GPU (gpu_proof)


def test_the_sanitizers_cases_launch_every_kernel_in_every_way(load) -> None:
    proof, device = load("gpu_proof"), load("cuflash").DeviceSpec.gpu("H100")
    cases = list(proof.cases(proof.Config()))
    plans = [case.plan(device) for _, case in cases]
    specs = {spec for plan in plans for spec in plan.specs.values()}
    on_disk = {f"{path.parent.name}_{path.stem}" for path in load("cuflash.compiler.source").KERNELS.glob("*/*.cu")}
    assert any(case.makes_lists for _, case in cases)
    of_lists = {spec.name for spec in load("cuflash.planning.list_kernels").LIST_SPECS.values()}
    of_lists |= {spec.name for spec in load("cuflash.planning.interval_kernels").INTERVAL_SPECS.values()}
    of_lists.add(load("cuflash.planning.chosen_lists").UNIONS.name)
    specs_beside = proof.specs_of_caches(device) | proof.specs_of_masses(device) | proof.specs_of_quantized(device)
    specs_beside |= proof.specs_of_captured_sums() | proof.specs_of_selectors() | proof.specs_of_results()
    # block masses that no Hopper GPU needs
    specs_beside |= proof.specs_of_masses(load("cuflash").DeviceSpec.gpu("A100"))
    assert {spec.name for spec in specs | specs_beside} | of_lists == on_disk
    assert {64, 128, 256} <= {spec.block_q for spec in specs if spec.name == "sm90_forward"}
    assert {(spec.is_split, spec.pack_gqa) for spec in specs if spec.name == "sm80_forward"} == {
        (False, False), (True, False), (True, True),
    }  # fmt: skip
    for family in proof.FAMILIES:
        mine = [(kind, case) for kind, case in cases if case.kernel == family]
        assert {kind for kind, _ in mine} >= set(proof.kinds_of_mask(8, 8))
        for fact in ("deterministic", "is_device_mask"):
            assert {getattr(case, fact) for _, case in mine} == {False, True}, (family, fact)
        structures = [case.structure for _, case in mine]
        assert {each.has_dlse for each in structures} == {False, True}
        assert any(each.dropout for each in structures) == (family != "fa1")
        assert {each.num_heads // each.num_kv_heads for each in structures} == {1, 2, 4}
        assert {each.layouts[0] for each in structures} == set(proof.LAYOUTS)
    of_backward = {
        (spec.is_listed, spec.finishes_dq, spec.dq_atomic_width)
        for spec in specs if spec.name == "sm90_backward"
    }
    assert of_backward == {
        (False, False, 4), (False, True, 4), (True, False, 4), (True, True, 4), (False, False, 0), (True, False, 0),
    }  # fmt: skip
    of_hopper = {case.structure.head_dim for _, case in cases if case.kernel == "sm90"}
    assert of_hopper == {40, 64, 128, 256}


def test_the_proof_s_selectors_launch_every_kernel_of_selectors(load, tmp_path, monkeypatch) -> None:
    proof = load("gpu_proof")
    with cupy_machine.installed(monkeypatch, tmp_path / "cache") as machine:
        machine.runs_kernels = False
        assert proof.run_selectors() == 27
        loaded = {(function.spec.entry.name, function.spec.dtype) for function in machine.launchable}
    expected = {(spec.entry.name, spec.dtype) for spec in proof.specs_of_selectors()}
    assert expected <= loaded and {entry for entry, _ in expected} <= set(machine.launched)


def test_a_call_that_differs_in_one_bit_is_counted(load, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = load("gpu_proof")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(zeros=np.zeros))
    first = [np.array([0.0, np.nan, 1.0], np.float16), np.zeros(2, np.float32)]
    other = [first[0], np.array([0.0, -0.0], np.float32)]
    answers = iter([first, first, other, first, other])
    assert proof.differing(lambda: next(answers), 5) == 2


# Replaces compute-sanitizer: prints the output that the case's kernel names on a separate line.
STAND_IN = """#!{python}
import json, sys, time
asked = json.loads(sys.argv[-1])
print("========= COMPUTE-SANITIZER", sys.argv[2], sys.argv[3] == sys.executable)
for line in {says!r}[asked["control"]]:
    print(line, flush=True)
    if line == "hangs":
        time.sleep(60)
"""


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
    outcomes = {name: (row["calls"], row["errors"], row["note"]) for name, row in rows.items()}
    assert outcomes == {
        "sound": (7, 0, ""),
        "racy": (7, 2, ""),
        "killed": (0, 3, "the process failed: RuntimeError: illegal access"),
        "silent": (7, None, "compute-sanitizer printed no summary"),
        "stuck": (0, None, "stopped after 1 s"),
    }
    wrong = [name for name, row in rows.items() if proof.is_wrong(row | {"check": "racecheck"})]
    assert wrong == ["racy", "killed", "silent", "stuck"]
    assert proof.in_sum([rows["sound"], rows["killed"]])["errors"] == 3
    summed = proof.in_sum([rows["racy"], rows["killed"], rows["silent"]])
    assert (summed["calls"], summed["errors"], summed["note"]) == (14, None, rows["killed"]["note"])
    assert not proof.is_wrong({"check": proof.CONTROL, "errors": 5}) and proof.is_wrong(
        {"check": proof.CONTROL, "errors": 0}
    )


def test_soak_adds_up_over_runs_and_draws_other_examples(load, tmp_path: Path) -> None:
    soak, path = load("soak"), tmp_path / "soak.csv"
    for number in range(2):
        drawn = soak.draw(soak.Batch("cpu", "float32", number, 6))
        rows, outside = drawn.rows, drawn.outside
        every = next(row for row in rows if row["feature"] == soak.EVERY)
        assert not outside and every["structures"] >= 6 and 0 < every["dq"] <= 1
        assert every["examples"] == soak.NUMBERS["cpu"] * every["structures"]
        assert every["worst"].startswith("Structure(")
        assert {"mask none", "values normal"} & {row["feature"] for row in rows}
        assert all(row["examples"] <= every["examples"] for row in rows)
        soak.Ledger(path).add(drawn)
    ledger = soak.Ledger(path).rows
    total = ledger["cpu", "host", "float32", "auto", soak.EVERY]
    assert int(total["structures"]) >= 12 and total["outside"] == "0" and total["batches"] == "2"
    assert next(soak.batches(soak.Config(dtypes=("float32",)), ledger)).number == 2
    assert soak.table(list(ledger.values())).row_count == 1


def test_the_examples_of_a_structure_in_soak_use_the_same_kernels(load) -> None:
    soak, formula = load("soak"), testing.formulas.Formula(tree=("add", ("load", "row"), ("load", "table")))
    structure = testing.strategies.Structure(head_dim=8, value_dim=8, dtype="float16", score=formula)
    used = []
    for each in [structure, *soak.others(structure, "gpu")]:
        example = each.example()
        options = {"score": example.score, "wrt": example.wrt, "deterministic": soak.is_deterministic(each)}
        used.append(cuflash.plan(example.q, example.k, example.v, executor="sim", **options)._plan.specs)
    assert len(used) == soak.NUMBERS["gpu"] and all(specs == used[0] for specs in used)


def test_soak_leaves_sorted_documents_to_a_gpu(load, cupy: Any) -> None:
    """Only unsorted ids become a block index on the host; any other mask has its arrays on the GPU."""
    on_gpu, shape, ids = load("soak").on_gpu, masks.MaskShape((), 1, 4, 4), np.array([-3, -3, 0, 7])
    for mask in (masks.Documents(ids), masks.Documents(ids, ids + 0) | masks.Causal(), masks.Lengths(kv=ids[0:1])):
        assert {type(array) for array in held_arrays(on_gpu(mask, shape))} == {cupy.ndarray}
    for mask in (masks.Documents(ids[::-1]), ~masks.Documents(ids, ids[::-1]) & masks.Causal()):
        np.testing.assert_array_equal(on_gpu(mask, shape).toarray()[0, 0], mask.toarray(4))
    assert on_gpu(None, shape) is None and on_gpu(masks.Causal(), shape) == masks.Causal()


def test_soak_reports_an_example_outside_its_bounds(load, monkeypatch: pytest.MonkeyPatch) -> None:
    soak, vjp_of = load("soak"), cuflash.attention_vjp

    def wrong(*arrays: np.ndarray, **options: Any) -> Any:
        (o, lse), vjp = vjp_of(*arrays, **options)
        return (o, lse + 1), vjp

    monkeypatch.setattr(soak.cuflash, "attention_vjp", wrong)
    _, rows, outside, _ = soak.draw(soak.Batch("cpu", "float32", 0, 4))
    assert outside and all(text.startswith("cpu, auto: Structure(") for text in outside)
    assert next(row for row in rows if row["feature"] == soak.EVERY)["outside"] == len(outside)


# Tables of the README


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


@pytest.fixture
def committed(harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the commit and other machine columns of rows that are written later."""
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


def test_pages_and_committed_plots_show_the_results(load) -> None:
    tables = load("tables")
    for page in tables.PAGES:
        tables.update(page, tables.RESULTS, check=True)
    shown = {name for page in tables.PAGES for name in re.findall(r"results/([\w-]+\.png)", page.read_text("utf-8"))}
    sizes = {name: (tables.RESULTS / name).stat().st_size for name in shown}
    assert "peers_lead.png" in sizes and max(sizes.values()) <= 200 * 1024


def test_a_long_table_shows_few_rows_and_folds_all(load, monkeypatch: pytest.MonkeyPatch) -> None:
    folding = load("folding")
    rows = [f"| {tokens} | {way} |" for tokens in range(10) for way in ("forward", "backward")]
    table = "\n".join(["| tokens | pass |", "| --- | ---: |", *rows])
    monkeypatch.setitem(folding.SHOWN, "some", {"tokens": ("3", "9"), "pass": ("forward",)})
    shown, fold = folding.folded("some", table).split("\n\n<details>\n")
    assert shown == "| tokens | pass |\n| --- | ---: |\n| 3 | forward |\n| 9 | forward |"
    assert fold == f"<summary>All 20 rows</summary>\n\n{table}\n\n</details>"
    short = "\n".join(table.split("\n")[:14])
    assert folding.folded("some", short) == short
    assert folding.folded("others", table).startswith("<details>")
    monkeypatch.setitem(folding.SHOWN, "some", {"tokens": tuple("012345"), "pass": ("forward", "backward")})
    with pytest.raises(ValueError, match="some shows 12 of 20 rows; at most 10"):
        folding.folded("some", table)


def test_long_tables_of_pages_show_rows_that_are_there(load) -> None:
    folding, tables = load("folding"), load("tables")
    for name in folding.SHOWN:
        pages = [page.read_text("utf-8") for page in tables.PAGES]
        (marked,) = [page.split(f"<!-- table:{name} -->")[1] for page in pages if f"<!-- table:{name} -->" in page]
        marked = marked.split("<!-- /table -->")[0]
        folds = marked.count("<details>")
        assert folds and len(folding.TABLE.findall(marked)) >= 2 * folds, name


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speed_vs_peers", {}), ("block_sparsity", {"gpu": True}), ("tile_sweep", {"gpu": True}), ("gpu_proof", {}),
        ("score_functions", {}), ("torch_calls", {}), ("training_step", {}), ("dropout", {}), ("speed_fp8", {}),
        ("derivatives", {}),
    ],
)  # fmt: skip
def test_without_a_gpu_an_experiment_on_one_says_so(load, monkeypatch: pytest.MonkeyPatch, name: str, options) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    experiment = load(name)
    with pytest.raises(SystemExit, match="CuPy is not installed"):
        list(experiment.run(experiment.Config(**options)))


def test_passes_of_tangents_are_timed_against_the_backward_pass_on_the_host(load, monkeypatch) -> None:
    experiment = load("derivatives")
    monkeypatch.setattr(experiment, "CPU_TOKENS", 256)
    config = experiment.Config(parts=("cpu",), head_dims=(8,), masks=("causal", "blocks64_0.5"), repeats=1)
    rows = list(experiment.run(config))
    named = [(row["kernel"], row["mask"], row["way"]) for row in rows]
    assert named == [("cpu", mask, way) for mask in config.masks for way in ("pass", "backward_jvp")]
    assert all(row["of_plain"] == row["ms"] / row["plain_ms"] > 0 for row in rows)
    with pytest.raises(ValueError, match="masks are full, causal and blocks"):
        experiment.Config(masks=("window",))


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


def test_a_result_outside_its_bound_is_wrong_and_a_peer_may_round_once_more(load) -> None:
    experiment = load("speed_vs_peers")
    check = SimpleNamespace(share=lambda o: o)
    assert experiment.checked("cuflash", check, {"o": 1.0}) == 1 and experiment.checked("flex", check, {"o": 2.0}) == 2
    for name, share in (("cuflash", 1.01), ("flex", 2.01), ("flex", np.nan)):
        with pytest.raises(experiment.Wrong, match="times the bound on o"):
            experiment.checked(name, check, {"o": share})


def test_rows_of_several_commits_are_refused_in_one_line(load) -> None:
    published = load("published")
    one, other = {"commit": "abc1234"}, {"commit": "fed4321"}
    assert published.of_one_commit([one, one], "a line") == [one, one]
    for rows in ([one, other], [{"commit": "abc1234-dirty"}], [{"commit": ""}]):
        with pytest.raises(ValueError, match="the line 'a line' must be of one commit"):
            published.of_one_commit(rows, "a line")


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
    cases = list(proof.cases(proof.Config(families=tuple(proof.families(proof.Config(), device)))))
    proof.nvrtc.precompile({s for _, c in cases for s in c.plan(device).specs.values()}, device.compute_capability)
    for _, case in cases:
        proof.run_case(case)
    assert {case.kernel for _, case in cases} >= {"simt", "naive"}
    assert proof.run_caches() and proof.run_masses() and proof.run_selectors() and proof.run_results()
    assert proof.run_captured_sums()


@pytest.mark.gpu
def test_tiled_and_naive_kernels_are_timed_on_a_gpu(load) -> None:
    experiment = load("simt_speed")
    records = experiment.run_rates(experiment.Config(num_heads=2, seqlen=200, head_dims=(64,), repeats=1))
    naive = {(row["measure"], row["dtype"]) for row in records if row["measure"].startswith("naive")}
    assert naive == {(f"naive {way}", dtype) for way in ("forward", "backward") for dtype in ("float16", "float32")}
    assert all(row["tflops"] > 0 for row in records)


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


def test_the_calls_that_are_timed_run_on_a_stand_in_for_a_gpu(load, monkeypatch, tmp_path) -> None:
    """Each call other than attention is repeated, by one thread at a time, and times are per call."""
    experiment = load("host_time")
    monkeypatch.setattr(experiment, "PLACES", 2)
    monkeypatch.setattr(experiment, "HEADS", 2)
    monkeypatch.setattr(experiment, "KV_HEADS", 1)
    monkeypatch.setattr(experiment, "THREADS", {"attention in 1 thread": 1})
    monkeypatch.setattr(experiment, "CALLS_OF_THREAD", 3)
    with cupy_machine.installed(monkeypatch, tmp_path) as machine:
        inputs = experiment.Inputs(70, machine.asarray)
        cases = {case.operation: case for case in experiment.cases_by_dlpack("cupy", inputs)}
        assert set(cases) == {*experiment.OPERATIONS, *experiment.SELECTORS} - {"attention in 8 threads"}
        for name in experiment.OPERATIONS[experiment.OPERATIONS.index("plan.forward(out=)") : -1]:
            before = len(machine.launched)
            row = experiment.timed(cases[name], lambda turn: None, lambda: None, lambda: None, 3, 60)
            assert float(row["us"]) > 0 and row["calls"] == 3 and len(machine.launched) - before >= 8


def test_every_selector_is_timed(load) -> None:
    """The calls that the host makes for a GPU also run on NumPy arrays, and choose some blocks of each row."""
    experiment = load("host_time")
    inputs = experiment.Inputs(256, lambda array: array)
    cases = {case.operation: case for case in experiment.cases_of_selectors(inputs)}
    every = {f"selectors.{name}" for name in dir(cuflash.selectors)} - {"selectors.Budget", "selectors.Forced"}
    assert set(cases) == every - {"selectors.page_bounds"} == set(experiment.SELECTORS)
    for name, case in cases.items():
        index = case.call(*case.prepare(3, None))
        rows = (index.blocks >= 0 if name == "selectors.quest" else index.states() > 0).sum(-1)
        # these selectors also keep pages or forced blocks
        keeps_more = name in ("selectors.vertical_slash", "selectors.quest", "selectors.nsa")
        assert rows.min() >= 1 and (rows.max() > 1) == keeps_more


def test_our_step_is_compared_with_the_other_one(load):
    steps = load("compared_steps")
    both = {
        "other": steps.Step(lambda: None, 1.0, np.array([3.0, 4.0])),
        "ours": steps.Step(lambda: None, 2.0, np.array([3.0, 4.5])),
    }
    rows = list(steps.compared(both, "ours", "of_other", {"tokens": 7}, repeats=3, warmup=1))
    other, ours = sorted(rows, key=lambda row: row["attention"] == "ours")
    assert ours["gradient_error"] == 0.1 and other["gradient_error"] is other["of_other"] is None
    assert ours["of_other"] == ours["ms"] / other["ms"] and (other["loss"], ours["loss"]) == (1.0, 2.0)
    assert ours["tokens"] == other["tokens"] == 7
    table = steps.table_of(rows, "ms", ("attention", "tokens"), "of_other")
    assert [column.header for column in table.columns] == ["attention", "tokens", "ms", "of_other", "gradient_error"]
