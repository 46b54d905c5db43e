"""Every example that a reader may copy runs; every name, path and command that the pages mention is there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cuflash
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md"))
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


def _readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def test_the_python_blocks_of_the_readme_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", _readme(), re.MULTILINE | re.DOTALL))
    assert blocks
    for block in blocks:
        line = _readme().count("\n", 0, block.start()) + 1
        if ">>> " in block[1]:
            example = doctest.DocTestParser().get_doctest(block[1], names, "README.md", "README.md", line)
            assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
            names.update(example.globs)
        else:
            exec(compile("\n" * line + block[1], "README.md", "exec"), names)


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith(("testing.", "reference."))])
def test_the_readme_mentions_every_public_name(name: str) -> None:
    assert re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", _readme())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    paths = set(re.findall(r"`((?:cuflash|tests|experiments|kernels_cu|\.ci)/[\w./-]*)`", text))
    assert [path for path in sorted(links | paths) if path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_commands_name_targets(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = re.findall(r"(?:^|`|\$ )make ((?:[\w-]+\b(?!=) ?)+)", page.read_text("utf-8"), re.MULTILINE)
    assert {word for command in commands for word in command.split()} <= targets
