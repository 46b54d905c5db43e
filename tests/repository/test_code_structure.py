"""The experiment that counts the code: lines, escapes from the type checker, caches, and files of a commit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from experiments.support.code_lines import code_lines, num_kernel_code_lines

pytest.importorskip("matplotlib", reason="the experiments need matplotlib: pip install -e '.[experiments]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install -e '.[experiments]'")

Load = Callable[[str], ModuleType]
MODULE = '''"""Docstring
of two lines."""

from functools import cache, lru_cache  # Any
from typing import Any, cast

CALLS = CallCache()
LIMITS = {1: 2}
_memo: dict[str, int] = {}
_names = WeakKeyDictionary[str, object]()


@cache
def f(x: object, *y: dict[str, object]) -> Any:
    """Say `object` and `Any`."""
    text = """a

    string"""
    return cast(Any, x)  # type: ignore[misc]


class A:
    """A docstring."""

    @lru_cache(maxsize=8)
    def g(self) -> object:
        return self
'''


def small_tree(folder: Path) -> Path:
    """Write a source tree of a few files to a folder, and return the folder."""
    files = {
        "cuflash/__init__.py": "", "cuflash/a/b.py": MODULE, "tests/t.py": "x = 1\n\n# comment\n",
        "kernels_cu/k.cu": "// comment\nint x;\n\n/* two\nlines */ int y;\n", "kernels_cu/k.md": "int z;\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def test_docstrings_comments_and_blank_lines_are_not_code() -> None:
    lines = MODULE.splitlines()
    code = [lines[number - 1].strip() for number in sorted(code_lines(MODULE))]
    assert len(code) == 16 and not any("docstring" in line.lower() or "Say" in line for line in code)
    assert 'string"""' in code and "" in code  # a blank line of a string is code
    assert num_kernel_code_lines("// a\nint x; // b\n\n/* c\n */ int y;\n") == 2


def test_the_counts_of_a_small_tree_are_right(load: Load, tmp_path: Path) -> None:
    tree = small_tree(tmp_path)
    assert {name: count for name, count in load("code_structure").counts_of_tree(tree).items() if count} == {
        ("code lines", "cuflash"): 16, ("code lines", "cuflash/a"): 16, ("code lines", "kernels_cu"): 2,
        ("physical lines", "tests"): 3, ("caches of calls", "CallCache"): 1, ("caches of functions", "functools"): 2,
        ("memos", "variables of modules"): 2, ("escapes from types", "Any"): 2, ("escapes from types", "object"): 3,
        ("escapes from types", "cast"): 1, ("escapes from types", "type: ignore"): 1, ("escapes from types", "all"): 7,
    }  # fmt: skip
    rows = list(load("code_structure").largest(tree, 1))
    assert [(row["part"], row["value"]) for row in rows] == [
        ("cuflash/a/b.py", 16), ("cuflash/a/b.py:A", 4), ("cuflash/a/b.py:A", 6)
    ]  # fmt: skip


def test_a_trial_lists_the_files_of_its_commit(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    structure, tree = load("code_structure"), small_tree(tmp_path)
    monkeypatch.setattr(structure, "ROOT", tree)

    def commit(message: str) -> None:
        identity = "-c", "user.name=a", "-c", "user.email=a@b"
        for words in (("add", "."), (*identity, "commit", "-q", "--no-gpg-sign", "-m", message)):
            subprocess.run(["git", *words], cwd=tree, check=True, capture_output=True)

    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    commit("before")
    (tree / "tests/t.py").write_text("x = 2\n", "utf-8")
    (tree / "cuflash/c.py").write_text("x = 2\n", "utf-8")
    commit("after")
    (row,) = structure.run(structure.Config(trials="kind=HEAD"))
    assert (row["part"], row["value"], row["files"]) == ("kind", 2, "cuflash/c.py tests/t.py")
    assert structure.table([row]).row_count == 1
    assert structure.counts_before("HEAD~")["physical lines", "tests"] == 3
    assert structure.counts_before("no-such-commit") == {}
    with pytest.raises(OSError, match="no-such-commit"):
        list(structure.run(structure.Config(trials="kind=no-such-commit")))
    with pytest.raises(ValueError, match="NAME=COMMIT"):
        structure.Config(trials="kind")


def test_rows_have_counts_before_and_goals(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    structure, tree = load("code_structure"), small_tree(tmp_path)
    monkeypatch.setattr(structure, "ROOT", tree)
    before = structure.counts_of_tree(tree) | {("escapes from types", "all"): 9}
    for name, result in {"counts_before": before, "planted_faults": [], "call_paths": []}.items():
        monkeypatch.setattr(structure, name, lambda *_, result=result: result)
    rows = {(row["measure"], row["part"]): row for row in structure.run(structure.Config())}
    assert rows["escapes from types", "all"].items() >= {"value": 7, "before": 9, "goal": 3}.items()
    assert rows["code lines", "cuflash"].items() >= {"value": 16, "before": 16, "goal": 30500}.items()
    assert structure.table(list(rows.values())).row_count == len(rows) > 12
