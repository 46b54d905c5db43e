"""How large is the code, how much of it escapes the type checker, and through how many functions does a call pass?

    python -m experiments code_structure --publish
    python -m experiments code_structure --trials mask_kind=COMMIT,dtype=COMMIT    # files that changes touch

Code lines hold more than white space, comments and docstrings (`code_lines.py`). Escapes from the type checker are uses
of the name `Any`, annotations that contain `object`, calls of `cast`, and comments `type: ignore`. A memo is a variable
of a module that starts as an empty dictionary. Faults are the edits of the sources that a test must detect, counted by
pytest's collection of a long run. `call_path.py` counts the modules, hand-overs and functions of calls.

The column `before` has the counts of the commit `--before`, whose call paths were counted at that time; `goal` has the
limits that were set then. Later capabilities could add 1,500 lines to the package and 2,500 to the tests each; the
goals include eight of them.

`--trials` writes another file, code_structure_trials.csv: for each name, the number and the names of the files that a
commit changes. Such a commit makes the smallest change that adds something of a kind, and is not kept.

Expect: at most 30,500 code lines, a third of the escapes, one cache of calls, and the goals of call paths.
Found:  one cache holds all calls, escapes are less than a third, and a new pass, mask or dtype touches at most five
files; but the package exceeds its goal by 5 %, the tests by 7 %, and 8 of 14 counts of call paths exceed theirs.

Cost: A minute on one core.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from code_lines import code_lines, lines_of, num_kernel_code_lines
from harness import Record, main, tabulated, track
from rich.table import Table

ROOT = Path(__file__).parents[2]
ESCAPES = "Any", "object", "cast", "type: ignore"
MEMOS = "dict", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary"
GOALS = {("code lines", "cuflash"): 30500, ("physical lines", "tests"): 60000, ("caches of calls", "CallCache"): 1}
MOST = {"largest modules": 400, "largest classes": 300}
# For each call: modules, hand-overs and functions at the commit --before, and the goals.
OF_CALLS: dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    "cpu warm": ((16, 135, 78), (9, 45, 40)),
    "cpu cold": ((27, 265, 205), (18, 110, 120)),
    "gradients warm": ((20, 420, 140), (14, 170, 90)),
    "cache warm": ((26, 217, 118), (14, 80, 60)),
    "sim warm": ((34, None, None), (16, None, None)),
    "sim gradients warm": ((36, None, None), (18, None, None)),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The commit to compare with, how many of the largest parts are listed, and commits of trials."""

    before: str = "b648872e"
    largest: int = 5
    trials: str = ""

    def __post_init__(self) -> None:
        if self.largest < 1:
            raise ValueError("largest must be positive")
        if not re.fullmatch(r"(\w+=[\w/.~^-]+(,|$))*", self.trials):
            raise ValueError(f"trials must be NAME=COMMIT with commas between; got {self.trials!r}")


def git(*words: str) -> bytes:
    """Return the output of a git command; empty if it fails, as for a commit that the clone lacks."""
    run = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    return run.stdout if run.returncode == 0 else b""


def texts(folder: Path, *suffixes: str) -> dict[str, str]:
    """Return the texts of a folder's files with these suffixes, by their path in the folder's parent."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix in suffixes)
    return {str(path.relative_to(folder.parent)): path.read_text("utf-8") for path in paths}


def escapes(text: str) -> Counter[str]:
    """Count the escapes from the type checker in a module."""
    counts = Counter({"type: ignore": len(re.findall(r"# type: ignore", text))})
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == "Any":
            counts["Any"] += 1
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "typing.cast"):
            counts["cast"] += 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations = [node.returns]
        else:
            annotations = [node.annotation] if isinstance(node, ast.arg | ast.AnnAssign) else []
        names = (each for annotation in filter(None, annotations) for each in ast.walk(annotation))
        counts["object"] += sum(isinstance(each, ast.Name) and each.id == "object" for each in names)
    return counts


def caches(text: str) -> Counter[tuple[str, str]]:
    """Count the caches that a module creates: for calls, by functools, and in variables of the module."""
    counts = Counter[tuple[str, str]]()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "CallCache":
            counts["caches of calls", "CallCache"] += 1
        for decorator in getattr(node, "decorator_list", ()):
            if re.fullmatch(r"(functools\.)?(lru_)?cache\b.*", ast.unparse(decorator)):
                counts["caches of functions", "functools"] += 1
    for node in tree.body:
        value = getattr(node, "value", None)
        is_dict = isinstance(value, ast.Dict) and not value.keys
        name = re.split(r"[\[(]", ast.unparse(value))[0] if isinstance(value, ast.Call) and not value.args else ""
        counts["memos", "variables of modules"] += is_dict or name in MEMOS
    return counts


def counts_of_tree(root: Path) -> dict[tuple[str, str], int]:
    """Return the counts of a source tree that need no import, by (measure, part)."""
    counts = Counter[tuple[str, str]]()
    for name, text in texts(root / "cuflash", ".py").items():
        size = len(code_lines(text))
        folder = Path(name).parent
        counts["code lines", str(folder) if folder.name != "cuflash" else "cuflash/*.py"] += size
        counts["code lines", "cuflash"] += size
        for part, number in escapes(text).items():
            counts["escapes from types", part] += number
            counts["escapes from types", "all"] += number
        counts += caches(text)
    for text in texts(root / "kernels_cu", ".cu", ".cuh").values():
        counts["code lines", "kernels_cu"] += num_kernel_code_lines(text)
    for text in texts(root / "tests", ".py").values():
        counts["physical lines", "tests"] += text.count("\n")
    return dict(counts)


def counts_before(commit: str) -> dict[tuple[str, str], int]:
    """Return the counts of a commit's tree; empty if the clone lacks the commit."""
    archive = git("archive", commit, "cuflash", "kernels_cu", "tests")
    if not archive:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        return counts_of_tree(Path(folder))


def largest(root: Path, count: int) -> Iterator[Record]:
    """Yield the modules and classes of the package with the most code lines, and their lines with docstrings."""
    modules, classes = [], []
    for name, text in texts(root / "cuflash", ".py").items():
        code = code_lines(text)
        modules.append((len(code), text.count("\n"), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                lines = lines_of(node)
                classes.append((len(code.intersection(lines)), len(lines), f"{name}:{node.name}"))
    for measure, parts in (("largest modules", modules), ("largest classes", classes)):
        for value, lines, part in sorted(parts, reverse=True)[:count]:
            yield {"measure": measure, "part": part, "value": value, "goal": MOST[measure], "physical_lines": lines}
    for _, lines, part in sorted(classes, key=lambda each: each[1], reverse=True)[:count]:
        yield {"measure": "longest classes", "part": part, "value": lines}


def planted_faults() -> Iterator[Record]:
    """Yield the numbers of planted faults, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/mutations", "tests/repository"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"CUFLASH_PROFILE": "long"}, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise OSError(f"pytest cannot collect the planted faults: {run.stdout[-500:]}{run.stderr[-500:]}")
    names = {"Python": "a_fault_of_python", "kernels": "a_fault_of_a_kernel", "experiments": "a_planted_fault"}
    for part, name in names.items():
        yield {"measure": "planted faults", "part": part, "value": run.stdout.count(f"::test_{name}_is_seen[")}


def call_paths() -> Iterator[Record]:
    """Yield the counts of calls that a new process makes."""
    command = [sys.executable, "-m", "experiments.support.call_path"]
    counts = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for call in OF_CALLS:
        for name, value, before, goal in zip(
            ("modules", "hand-overs", "functions"), counts.get(call, ()), *OF_CALLS[call], strict=False
        ):
            yield {"measure": f"{name} of a call", "part": call, "value": value, "before": before, "goal": goal}


def trials(config: Config) -> Iterator[Record]:
    """Yield the files that the commits of trials change.

    Raises
    ------
    OSError
        The clone lacks a commit.
    """
    for trial in config.trials.split(","):
        name, _, commit = trial.partition("=")
        if not (files := git("diff", "--name-only", f"{commit}~", commit).decode().split()):
            raise OSError(f"git knows no change {commit!r}")
        row = {"measure": "files of a trial", "part": name, "value": len(files), "goal": 6, "files": " ".join(files)}
        yield row | {"parent": git("rev-parse", "--short", f"{commit}~").decode().strip()}


def run(config: Config) -> Iterator[Record]:
    """Yield a record for each count, or for each trial."""
    if config.trials:
        yield from trials(config)
        return
    before, now = (count() for count in track([lambda: counts_before(config.before), lambda: counts_of_tree(ROOT)], ""))
    for (measure, part), value in sorted(now.items()):
        row: Record = {"measure": measure, "part": part, "value": value, "before": before.get((measure, part))}
        goal = GOALS.get((measure, part))
        if (measure, part) == ("escapes from types", "all") and before:
            goal = before[measure, part] // 3
        yield row | {"goal": goal}
    yield from largest(ROOT, config.largest)
    yield from planted_faults()
    yield from call_paths()


def table(records: list[Record]) -> Table:
    """Tabulate the counts."""
    return tabulated("structure of the code", ("measure", "part", "value", "before", "goal"), records)


if __name__ == "__main__":
    main(Config, run, table, name=lambda config: f"code_structure{'_trials' * bool(config.trials)}")
