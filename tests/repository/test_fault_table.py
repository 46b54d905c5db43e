"""The page's table of faults names tests that exist, and marks those that need a GPU; chips are those of the gate."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from cuflash import DeviceSpec
from test_kernels_compile import CHIPS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "correctness.md").read_text("utf-8")
ROWS = [line.split(" | ") for line in PAGE.partition("## Faults on purpose")[2].partition("\n## ")[0].splitlines()]
FAULTS = [row for row in ROWS if len(row) == 3][2:]


@cache
def named_in(file: str) -> dict[str, bool]:
    """Return the tests of a file, and whether each needs a GPU."""
    functions = ast.parse((ROOT / "tests" / file).read_text("utf-8")).body
    return {
        node.name: any("mark.gpu" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in functions
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_table_has_every_fault() -> None:
    assert len(FAULTS) == 16


@pytest.mark.parametrize(("fault", "outcome", "named"), FAULTS, ids=[row[0].strip("| ")[:40] for row in FAULTS])
def test_a_fault_names_tests_that_exist(fault: str, outcome: str, named: str) -> None:
    num_tests = 0
    for part in named.split(";"):
        (file,) = re.findall(r"`([a-z_]+/[a-z0-9_]+\.py)`", part)
        for star, name in re.findall(r"(\*?)`(test_\w+)`", part):
            assert named_in(file)[name] == bool(star), name
            num_tests += 1
    assert num_tests and outcome


def test_the_page_of_support_has_every_chip_of_the_compile_gate() -> None:
    page = (ROOT / "docs" / "support.md").read_text("utf-8")
    for name in CHIPS:
        major, minor = DeviceSpec.gpu(name).compute_capability or (0, 0)
        either = rf"{name}(?: and H200)?,? {major}\.{minor}\b|H100 and H200, {major}\.{minor}"
        assert re.search(either, page), f"{name} {major}.{minor}"
