"""Modules, functions and kernel files stay short, counted without docstrings, comments and overloads."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from experiments.support.code_lines import code_lines, lines_of, num_kernel_code_lines
from lexing import spans

ROOT = Path(__file__).parents[2]
LIBRARY, KERNELS = ROOT / "cuflash", ROOT / "kernels_cu"
MOST_OF_FILE, MOST_OF_CLASS, MOST_OF_FUNCTION, MOST_OF_KERNEL_FILE, MOST_OF_KERNEL_FUNCTION = 400, 300, 60, 350, 80
Function = ast.FunctionDef | ast.AsyncFunctionDef


def counted_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold code, without those of overloads."""
    numbers = code_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and "overload" in map(ast.unparse, node.decorator_list):
            numbers -= {*lines_of(node), *(decorator.lineno for decorator in node.decorator_list)}
    return numbers


def with_bases(name: str, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class of a module and its bases in that module, whose lines count towards its own."""
    bases = (base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes)
    return [classes[name], *(each for base in bases for each in with_bases(base, classes))]


def too_long(text: str) -> Iterator[str]:
    """Yield the parts of a module that are longer than the rules allow."""
    code = counted_lines(text)
    if len(code) > MOST_OF_FILE:
        yield f"the file has {len(code)} lines"
    tree = ast.parse(text)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for name in classes:
        if (size := sum(len(code & set(lines_of(each))) for each in with_bases(name, classes))) > MOST_OF_CLASS:
            yield f"{name} has {size} lines"
    for node in ast.walk(tree):
        if isinstance(node, Function) and (size := len(code & set(lines_of(node)))) > MOST_OF_FUNCTION:
            yield f"{node.name} has {size} lines"


def faults(check: Callable[[str], Iterable[str]], paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return the parts of files that a check finds too long, by the path of the file."""
    every = {str(path.relative_to(ROOT)): list(check(path.read_text("utf-8"))) for path in paths}
    assert len(every) > 100
    return {path: parts for path, parts in every.items() if parts}


def test_modules_and_functions_are_short() -> None:
    assert faults(too_long, LIBRARY.rglob("*.py")) == {}


def test_long_modules_and_functions_are_named() -> None:
    function = "def f():\n" + "    x = 1\n" * MOST_OF_FUNCTION
    assert list(too_long(function)) == [f"f has {MOST_OF_FUNCTION + 1} lines"]
    assert list(too_long("x = 1\n" * (MOST_OF_FILE + 1))) == [f"the file has {MOST_OF_FILE + 1} lines"]
    assert list(too_long("x = 1\n" * MOST_OF_FILE)) == []
    half = "    x = 1\n" * (MOST_OF_CLASS // 2)
    assert list(too_long(f"class A:\n{half}class B(A):\n{half}")) == [f"B has {MOST_OF_CLASS + 2} lines"]
    assert list(too_long(f"class A:\n{half}class B:\n{half}")) == []


def long_kernel_functions(text: str) -> list[str]:
    """List the functions of CUDA C++ that are longer than the rules allow, and the file itself if it is."""
    every = spans(text, "cuda")
    classes = {each.name.rpartition(".")[0] for each in every}
    pieces = {each.name: text[each.start : each.stop] for each in every}
    functions = (
        name for name, piece in pieces.items()
        if name not in classes and not re.match(r"(template <.*?>\s*)?(struct|class|enum|union)\b", piece, re.DOTALL)
    )  # fmt: skip
    whole = ["the file"] if num_kernel_code_lines(text) > MOST_OF_KERNEL_FILE else []
    return whole + [name for name in functions if num_kernel_code_lines(pieces[name]) > MOST_OF_KERNEL_FUNCTION]


def test_kernel_files_and_functions_are_short() -> None:
    assert faults(long_kernel_functions, [*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")]) == {}


def test_long_kernel_functions_are_named() -> None:
    body = "  f();\n" * (MOST_OF_KERNEL_FUNCTION - 2)
    source = f"struct Long {{\n  int x;\n{'  int y;' * 3}\n  void g() {{\n{body}  }}\n  void i() {{}}\n}};\n"
    template = "template <class A>\n__device__ void h(A) {{\n{0}}}\n"
    assert long_kernel_functions(source) == []
    assert long_kernel_functions(source.replace("  int x;", body)) == []  # a class may be longer
    assert long_kernel_functions(template.format(body)) == ["h"]
    assert long_kernel_functions(source.replace(body, body + "  f();\n")) == ["Long.g"]
    assert long_kernel_functions("int x;\n" * (MOST_OF_KERNEL_FILE + 1)) == ["the file"]
