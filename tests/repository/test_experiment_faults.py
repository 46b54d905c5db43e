"""Faults planted in the source of the experiments, each of which a test of the experiments must detect."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from mutations.planting import replaced

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
Load = Callable[[str], ModuleType]


class Fault(NamedTuple):
    """An edit of a function of an experiment, and the test that must fail with it."""

    file: str
    function: str
    anchor: str
    replacement: str
    test: str


def of(name: str) -> Any:
    """Return the test with the name "module.function"."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(module), function)


TRAINING, TASKS = "language/training.py", "sweeps/tasks.py"
RESUMES = "test_training.test_an_interrupted_training_ends_with_the_same_bits"
HELD_OUT = "test_training.test_steps_never_see_the_held_out_text"
GRADIENTS = "test_training.test_naive_attention_is_exact_and_a_wrong_key_is_not"
DONE = "test_sweeps.test_what_is_done_is_not_measured_again_and_other_commits_are"
FAILED = "test_sweeps.test_a_failure_is_recorded_and_the_sweep_goes_on"
KEPT = "test_sweeps.test_the_table_keeps_the_rows_of_earlier_sweeps"
NAMED = "test_sweeps.test_a_task_is_named_by_what_its_files_hold"
SHARES = "test_experiments.test_a_spot_check_passes_what_is_right_and_sees_what_is_not"
GRADIENT_ERROR = "test_selector_shootout.test_all_blocks_have_no_error_and_equal_gradients"
UNBEATEN = "test_selector_shootout.test_pages_tell_what_a_selector_does_not_beat"
COUNTERS = "test_flashattention1_experiments.test_counters_are_read_from_what_ncu_prints"
TRAFFIC = "proof/memory_traffic.py"
SHOOTOUT = "sparsity/selector_shootout.py"
STRUCTURE = "proof/code_structure.py"
COUNTS = "test_code_structure.test_the_counts_of_a_small_tree_are_right"
ENDS = "test_training.test_ends_are_far_apart_and_labels_are_equal_colours"
FAULTS = {
    "squares are lost": Fault(TRAINING, "continued", "xp.asarray(file[part])", "0 * xp.asarray(file[part])", RESUMES),
    "checkpoints are late": Fault(TRAINING, "steps", "% every == 0", "% every == 1", RESUMES),
    "every step sees the same text": Fault(TRAINING, "pieces", "(recipe.seed, step)", "(recipe.seed, 1)", HELD_OUT),
    "no text is held out": Fault(TRAINING, "trained_on", "(1 - HELD_OUT)", "1", HELD_OUT),
    "naive weights are not centred": Fault(TRAINING, "vjp", "(do * o).sum(axis=-1, keepdims=True)", "0", GRADIENTS),
    "no key is wrong": Fault(TRAINING, "wrong_key", "k[:, :, 15:-1:16]", "k[:, :, 16::16]", GRADIENTS),
    "a done task is measured again": Fault(TASKS, "measure", "task.result.exists()", "False", DONE),
    "results of another commit count": Fault(TASKS, "stem", "self.commit, *filter", "'', *filter", DONE),
    "a failure is a result": Fault(TASKS, "measure", 'if "failure" in result else', "if False else", FAILED),
    "rows of earlier sweeps are dropped": Fault(
        "sweeps/sweep.py", "rows_of",
        "for folder in dict.fromkeys(task.folder for task in tasks):", "for folder in ():", KEPT,
    ),
    "files of one's own do not count": Fault(TASKS, "stem", "*filter(None, [self.own])", "", NAMED),
    "a check without results passes": Fault("support/spot_check.py", "share", "if not results:", "if False:", SHARES),
    "gradients are those of all keys": Fault(SHOOTOUT, "gradients", "mask=index", "mask=None", GRADIENT_ERROR),
    "errors are squares": Fault(SHOOTOUT, "distance", ") ** 0.5", ")", GRADIENT_ERROR),
    "as good is better": Fault("support/experiment_tables.py", "unbeaten", "own <= share", "own < share", UNBEATEN),
    "only writes are counted": Fault(
        TRAFFIC, "totals", "sum(counters.values())", "[*counters.values()][-1]", COUNTERS
    ),
    "the last launch counts": Fault(TRAFFIC, "by_shape", "shapes[-1].get(name, 0) + moved", "moved", COUNTERS),
    "one end alone tells": Fault(
        "sparsity/long_range.py", "sequences", "(colours + np.where(", "(0 * colours + np.where(", ENDS
    ),
    "ends are near": Fault(
        "sparsity/long_range.py", "sequences", "rng.integers(3 * seqlen // 4,", "rng.integers(seqlen // 4,", ENDS
    ),
    "results have no annotation": Fault(
        STRUCTURE, "escapes", "annotations = [node.returns]", "annotations = []", COUNTS
    ),
    "every dictionary is a memo": Fault(STRUCTURE, "caches", "and not value.keys", "", COUNTS),
}  # fmt: skip


def arguments(test: str, load: Load, folder: Path) -> list[Any]:
    """Return the arguments of a test, in the order of its parameters."""
    first = {"test_sweeps": "sweep", "test_training": "training"}.get(test.partition(".")[0], "selector_shootout")
    return {
        COUNTERS: [load], GRADIENT_ERROR: [load(first)], UNBEATEN: [load(first)],
        RESUMES: [load(first), folder], HELD_OUT: [load(first)], GRADIENTS: [load(first)], DONE: [load(first), folder],
        FAILED: [load(first), folder], ENDS: [load], KEPT: [load(first), folder], NAMED: [load(first), folder],
        SHARES: [load], COUNTS: [load, folder],
    }[test]  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    path = EXPERIMENTS / fault.file
    others = "sweep", "tasks", "training", "long_range", "spot_check"
    planted = ModuleType(path.stem)
    planted.__file__ = str(path)
    for module in (*others, *(Path(each.file).stem for each in FAULTS.values())):
        monkeypatch.setitem(sys.modules, module, planted)  # so that what the test imports under this name is removed
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, path.stem, planted)
    text = replaced(path.read_text("utf-8"), fault.anchor, fault.replacement, fault.function, language="python")
    exec(compile(text, str(path), "exec"), vars(planted))
    with pytest.raises((AssertionError, ValueError)):
        of(fault.test)(*arguments(fault.test, load, tmp_path))


@pytest.mark.parametrize("test", sorted({fault.test for fault in FAULTS.values()}))
def test_without_a_fault_it_passes(test: str, load: Load, tmp_path: Path) -> None:
    of(test)(*arguments(test, load, tmp_path))
