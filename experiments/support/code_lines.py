"""Counts of lines of code: lines that hold more than white space, comments and docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize

WITHOUT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of a statement's lines."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of a Python module that hold code."""
    numbers = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in WITHOUT_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            numbers -= set(lines_of(node.body[0]))
    return numbers


def num_kernel_code_lines(text: str) -> int:
    """Return the number of lines of a file of CUDA C++ that hold code."""
    without_comments = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return sum(1 for line in without_comments.splitlines() if line.strip())
