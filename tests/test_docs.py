"""Every example that a reader may copy runs; every name, path and command that the pages mention is there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import cuflash
import pytest

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs" / "design").glob("*.md"))
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *GUIDES, *DECISIONS]
RESULTS = ROOT / "experiments" / "results"
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?=us\b|TF\b|[^\w.]|\.(?!\d)|$)")
MODULES = [name for _, name, _ in pkgutil.walk_packages(cuflash.__path__, "cuflash.") if not name.endswith("__main__")]


def _public(module: ModuleType, prefix: str) -> Iterator[tuple[str, Any]]:
    """Public names and what they stand for, those inside public modules too."""
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{prefix}{name}", value
        if inspect.ismodule(value):
            yield from _public(value, f"{prefix}{name}.")


PUBLIC = dict(_public(cuflash, ""))
EXPLAINED = [name for name, value in PUBLIC.items() if inspect.isclass(value) or inspect.isroutine(value)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", EXPLAINED)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(PUBLIC[name]) or "")


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.ismodule(value)])
def test_every_public_module_says_what_it_is_about(name: str) -> None:
    assert PUBLIC[name].__doc__


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text("utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        if ">>> " in block[1]:
            example = doctest.DocTestParser().get_doctest(block[1], names, page.name, page.name, line)
            assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
            names.update(example.globs)
        else:
            exec(compile("\n" * line + block[1], page.name, "exec"), names)


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith(("testing.", "reference."))])
def test_the_readme_or_a_guide_mentions_every_public_name(name: str) -> None:
    pages = (page.read_text("utf-8") for page in (ROOT / "README.md", *GUIDES))
    assert any(re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", page) for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    found = {page.parent / link.partition("#")[0] for link in links if "://" not in link}
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text):
        # Paths are relative to the repository, or in short to the library or to its kernels.
        roots = [root for root in (ROOT, ROOT / "cuflash", ROOT / "kernels_cu") if (root / path.split("/")[0]).is_dir()]
        found |= {roots[0] / path} if roots and not any((root / path).exists() for root in roots) else set()
    assert sorted(str(path) for path in found if not path.exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_commands_name_targets(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = re.findall(r"(?:^|`|\$ )make ((?:[\w-]+\b(?!=) ?)+)", page.read_text("utf-8"), re.MULTILINE)
    assert {word for command in commands for word in command.split()} <= targets


def _decisions() -> Iterator[tuple[str, str]]:
    """The sections of the design pages that hold a decision, by page and title."""
    for page in DECISIONS:
        for section in re.split(r"^(?=##+ )", page.read_text("utf-8"), flags=re.MULTILINE):
            if section.startswith("### "):
                text = re.sub(r"^\[[^\]]+\]: \S+$", "", section, flags=re.MULTILINE)
                yield f"{page.stem}: {text.splitlines()[0].removeprefix('### ')}", text


SECTIONS = dict(_decisions())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_decision_has_its_four_parts_in_few_lines(name: str) -> None:
    lines = [line for line in SECTIONS[name].splitlines()[1:] if line]
    parts = [word for line in lines for word in re.findall(r"^\*\*(\w+)\*\* ", line)]
    assert parts == ["Context", "Decision", "Evidence", "Consequence"]
    assert len(lines) <= 15


@pytest.mark.parametrize("name", SECTIONS)
def test_numbers_of_a_decision_are_in_the_results_that_it_names(name: str) -> None:
    """Every number in a table's cells, but for the first of a row, is a number of those files, or one rounded."""
    tables = re.findall(r"^\|--.*\n((?:\|.*\n)+)", SECTIONS[name], re.MULTILINE)
    rows = [row.strip("| ").split("|") for table in tables for row in table.splitlines()]
    cells = {number for _, *row in rows for cell in row for number in NUMBER.findall(cell)}
    results = {RESULTS / file for file in re.findall(r"\[([\w.]+\.(?:csv|log))\]", SECTIONS[name])}
    assert all(path.exists() for path in results)
    measured = {Decimal(number) for path in results for number in NUMBER.findall(path.read_text("utf-8"))}
    assert sorted(cell for cell in cells if not any(_rounds_to(number, Decimal(cell)) for number in measured)) == []


def _rounds_to(number: Decimal, shown: Decimal) -> bool:
    exponent = shown.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(number - shown) * 2 <= Decimal(1).scaleb(exponent)
