"""Every example on the pages prints what the page shows; every name, path and command that they mention exists."""

from __future__ import annotations

import configparser
import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cuflash
import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs" / "design").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *DECISIONS]
README = (ROOT / "README.md").read_text("utf-8")
API = (ROOT / "docs" / "api.md").read_text("utf-8")
RESULTS = ROOT / "experiments" / "results"
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?(?=us\b|TF\b|[^\w.]|\.(?!\d)|$)")
MODULES = [name for _, name, _ in pkgutil.walk_packages(cuflash.__path__, "cuflash.") if not name.endswith("__main__")]


def _public(module: ModuleType, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield public names and their values, including those inside public modules."""
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{prefix}{name}", value
        if inspect.ismodule(value):
            yield from _public(value, f"{prefix}{name}.")


PUBLIC = dict(_public(cuflash, ""))


NEEDED = {"cuflash.torch": "torch", "cuflash.executors.torch_gpu": "torch", "cuflash.jax": "jax"}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


OF_MODULES = ["cuflash", "cuflash.torch", "cuflash.jax", "cuflash.testing"]
OF_MODULES += [value.__name__ for value in PUBLIC.values() if inspect.ismodule(value)]


@pytest.mark.parametrize("name", OF_MODULES)
def test_every_public_module_says_what_it_is_about_and_shows_public_names_alone(name: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    module = importlib.import_module(name)
    assert module.__doc__ and set(dir(module)) - {"__version__"} == set(module.__all__)


class Block(NamedTuple):
    """A Python block of a page: source, the output shown below it, its line, and the package that it needs."""

    source: str
    output: str | None
    line: int
    needs: str


# A block may follow `<!-- needs: PACKAGE -->`; a block without a language directly after it is its output.
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[\w.]+) -->\n)?```python\n(?P<source>.*?)^```\n(?:\n```\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
COMPARED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(match["source"], match["output"], text.count("\n", 0, match.start("source")), match["needs"] or "")
        for match in FENCE.finditer(text)
    ]


def run_blocks(page: Path, packages: Sequence[str]) -> None:
    """Run a page's blocks in order in one namespace, and compare what they print with what the page shows."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.needs and block.needs not in packages:
            continue
        if ">>> " in block.source:
            test = doctest.DocTestParser().get_doctest(block.source, names, page.name, str(page), block.line)
            assert doctest.DocTestRunner(optionflags=COMPARED).run(test, clear_globs=False).failed == 0
            names.update(test.globs)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.source, str(page), "exec"), names)
        if block.output is not None:
            assert doctest.OutputChecker().check_output(block.output, printed.getvalue(), COMPARED), printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_a_page_fits_into_its_column(page: Path) -> None:
    """The site's column fits 90 characters of code, and 113 of a diagram in a ```text block."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    limits = {"text": 113}
    wide = [line for language, code in fences for line in code.splitlines() if len(line) > limits.get(language, 90)]
    assert wide == []


NEEDS = sorted({(page.name, block.needs) for page in PAGES for block in blocks(page) if block.needs})


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page, ())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch emits it when it loads forward mode or compiles
@pytest.mark.parametrize(("name", "package"), NEEDS)
def test_the_python_blocks_that_need_a_package_print_what_their_page_shows(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run_blocks(ROOT / "docs" / name, [each for of, each in NEEDS if of == name and find_spec(each)])


def test_output_that_a_page_does_not_show_is_seen(tmp_path: Path) -> None:
    """Blocks of both forms fail if they print something else."""
    page = tmp_path / "page.md"
    for text in ("```python\n>>> 1 + 1\n3\n```\n", "```python\nprint(2)\n```\n\n```\n3\n```\n"):
        page.write_text(text)
        with pytest.raises(AssertionError):
            run_blocks(page, ())
        page.write_text(text.replace("3\n", "2\n"))
        run_blocks(page, ())


def test_pages_without_their_tables_have_at_most_6000_lines() -> None:
    pages = [page.read_text("utf-8") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    texts = [re.sub(r"<!-- table:.*?<!-- /table -->", "", page, flags=re.DOTALL) for page in pages]
    assert sum(not line.startswith("|") for text in texts for line in text.splitlines()) <= 6000


def test_the_map_has_the_rooms_in_the_order_of_their_contract() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    layers = setup["importlinter:contract:rooms"]["layers"].split()
    (line,) = re.findall(r"^`([^`]*←[^`]*)`$", (ROOT / "DESIGN.md").read_text("utf-8"), re.MULTILINE)
    assert re.split(r"\s*←\s*", line) == layers[::-1]
    assert "←" not in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_a_broken_link_of_the_site_is_reported(tmp_path: Path) -> None:
    spec = spec_from_file_location("check_site", ROOT / "docs" / "check_site.py")
    assert spec and spec.loader
    check_site = module_from_spec(spec)
    spec.loader.exec_module(check_site)
    (tmp_path / "folder").mkdir()
    (tmp_path / "one.html").write_text('<p id="here"><a href="folder/two.html#there">two</a><a href="#here">one</a>')
    (tmp_path / "folder" / "two.html").write_text('<p id="there"><a href="https://a.b/">x</a><img src="../one.html">')
    assert list(check_site.broken_links(tmp_path)) == []
    (tmp_path / "folder" / "two.html").write_text('<a href="../three.html">x</a><span class="xref myst">y</span>')
    assert sorted(check_site.broken_links(tmp_path)) == [
        "folder/two.html: ../three.html leads nowhere",
        "folder/two.html: 1 references are plain text",
        "one.html: folder/two.html#there leads nowhere",
    ]


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 150


def test_the_page_on_installation_lists_every_extra() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "install.md").read_text("utf-8"), re.MULTILINE)
    assert set(setup["options.extras_require"]) <= {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_lists_every_public_name(name: str) -> None:
    assert re.search(rf"(^ +|`){re.escape(name)}(`|$)", API, re.MULTILINE)


IMPORTED = re.compile(
    r"^(?:>>> |\.\.\. )?\s*(?:from (cuflash[\w.]*) import ([\w, ]+)|import (cuflash[\w.]*))", re.MULTILINE
)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in DECISIONS], ids=lambda page: page.name)
def test_pages_import_what_the_reference_lists(page: Path) -> None:
    """A page may import a module if the reference lists a name of it, and may import only names that it lists."""
    for module, names, alone in IMPORTED.findall(page.read_text("utf-8")):
        path = (module or alone).partition(".")[2]
        for name in [each.strip() for each in names.split(",") if names] or [""]:
            wanted = ".".join(filter(None, (path, name)))
            assert not wanted or re.search(rf"(^ +|`){re.escape(wanted)}(\.|`|$)", API, re.MULTILINE), wanted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    paths = {page.parent / link.partition("#")[0] for link in links if "://" not in link}
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text):
        # Paths are relative to the repository, to the library, or to its kernels. Experiments create build/.
        if path.startswith("build/"):
            continue
        roots = [root for root in (ROOT, ROOT / "cuflash", ROOT / "kernels_cu") if (root / path.split("/")[0]).is_dir()]
        paths |= {roots[0] / path} if roots and not any((root / path).exists() for root in roots) else set()
    assert sorted(str(path) for path in paths if not path.exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_commands_name_targets(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    commands = re.findall(r"(?:^|`|\$ )make ((?:[\w-]+\b(?!=) ?)+)", page.read_text("utf-8"), re.MULTILINE)
    assert {word for command in commands for word in command.split()} <= targets


def _decisions() -> Iterator[tuple[str, str]]:
    """Yield the sections of the design pages that contain a decision, by page and title."""
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
    """Every number in a table's cells, except each row's first, is in those files, possibly with more digits."""
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
