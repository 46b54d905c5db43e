"""Tokens of Python and CUDA C++ with their positions, and the functions and classes that a file defines.

Comments and white space are not tokens, and neither are Python's line ends and indentation: a text may be part of a
line, one line, or several lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

Language = Literal["cuda", "python"]

_CUDA = r"""
(?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
| (?P<space> (?:\s|\\\n)+ )
| (?P<string> (?:u8|[uUL])?
    (?: (?<=\#include[ ])<[^>\n]*>
    | R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)" | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' ) )
| (?P<name> [A-Za-z_]\w* )
| (?P<number> \.?\d (?: [eEpP][+-] | '?[\w.] )* )
| (?P<operator> <<= | >>= | <=> | \.\.\. | ->\* | \#\# | [-+*/%&|^=!<>]= | \+\+ | -- | -> | << | >> | && | \|\|
    | :: | . )
"""
_PYTHON = r"""
(?P<comment> \#[^\n]* )
| (?P<space> (?:\s|\\\r?\n)+ )
| (?P<string> (?i:[rbuf]|rb|br|rf|fr)? (?: \"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3}
    | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' ) )
| (?P<name> [^\W\d]\w* )
| (?P<number> 0[xX][\da-fA-F_]+ | 0[bB][01_]+ | 0[oO][0-7_]+
    | (?: \d[\d_]*\.?[\d_]* | \.\d[\d_]* ) (?:[eE][+-]?\d[\d_]*)? [jJ]? )
| (?P<operator> \*\*= | //= | >>= | <<= | \.\.\. | [-+*/%&|^=!<>@:]= | \*\* | // | << | >> | -> | . )
"""
_LEXERS: Mapping[Language, re.Pattern[str]] = {
    "cuda": re.compile(_CUDA, re.VERBOSE | re.DOTALL),
    "python": re.compile(_PYTHON, re.VERBOSE | re.DOTALL),
}


class Token(NamedTuple):
    text: str
    start: int
    kind: str  # "name", "number", "string" or "operator"; also "comment" in lexed()

    @property
    def stop(self) -> int:
        return self.start + len(self.text)


class Span(NamedTuple):
    """A function or class, from its first token, which may belong to a template or decorator, to its last."""

    name: str  # includes enclosing classes, and in Python enclosing functions: "LazySoftmax.raise"
    start: int
    stop: int

    def has_name(self, name: str) -> bool:
        return self.name == name or self.name.endswith(f".{name}")


def language_of(path: Path | str) -> Language:
    return "python" if Path(path).suffix == ".py" else "cuda"


@lru_cache(maxsize=1024)
def lexed(text: str, language: Language) -> tuple[Token, ...]:
    """Return all tokens of a text, which may be part of a file, including comments."""
    matches = _LEXERS[language].finditer(text)
    return tuple(Token(each[0], each.start(), each.lastgroup or "") for each in matches if each.lastgroup != "space")


@lru_cache(maxsize=1024)
def tokens(text: str, language: Language) -> tuple[Token, ...]:
    """Return all tokens of a text except comments."""
    return tuple(token for token in lexed(text, language) if token.kind != "comment")


@lru_cache(maxsize=256)
def spans(text: str, language: Language) -> tuple[Span, ...]:
    """Return the functions, classes and structs of an entire file; in CUDA only those outside functions."""
    return tuple(_python_spans(text) if language == "python" else _cuda_spans(text))


def _python_spans(text: str) -> Iterator[Span]:
    starts = [0, *(end.end() for end in re.finditer("\n", text)), len(text)]

    def walk(node: ast.AST, prefix: str) -> Iterator[Span]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                assert child.end_lineno is not None
                yield Span(prefix + child.name, starts[first - 1], starts[child.end_lineno])
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(ast.parse(text), "")


# Words that precede a parenthesis in a declaration but are not the function's name.
_NO_NAMES = {
    "alignas", "__align__", "__attribute__", "__launch_bounds__", "decltype", "explicit", "noexcept", "requires",
    "static_assert", "operator",
}  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Declarations:
    """A parser of the declarations of a CUDA file, which skips the bodies of functions."""

    def __init__(self, text: str) -> None:
        directives = [match.span() for match in re.finditer(r"^[ \t]*#(?:\\\n|[^\n])*", text, re.MULTILINE)]
        in_directives = {at for start, stop in directives for at in range(start, stop)}
        self.tokens = [token for token in tokens(text, "cuda") if token.start not in in_directives]
        self.texts = [token.text for token in self.tokens]
        self.at = 0

    def spans(self, prefix: str = "") -> Iterator[Span]:
        """Yield the spans of one scope, to its closing brace or the end of the file."""
        while self.at < len(self.texts) and self.texts[self.at] != "}":
            yield from self.declaration(prefix)
        self.at += 1

    def declaration(self, prefix: str) -> Iterator[Span]:
        first = self.at
        while self.text() == "template":
            self.at += 1
            self.pass_angles()
        head = self.text()
        if head == "namespace" or (head == "extern" and self.text(2) == "{"):
            while self.text() not in "{;=":
                self.at += 1
            if self.text() == "{":
                self.at += 1
                yield from self.spans(prefix)
                return
        if head in ("struct", "class", "union", "enum"):
            name = self.type_name()
            while self.text() not in ("{", ";", "(", "="):
                self.at += 1
            if self.text() == "{":
                if head == "enum":
                    self.pass_group()
                else:
                    self.at += 1
                    yield from self.spans(f"{prefix}{name}.")
                yield Span(prefix + name, self.tokens[first].start, self.tokens[self.at - 1].stop)
                self.pass_to_semicolon()
                return
        name = self.function_name()
        if name:
            self.pass_group()
            yield Span(prefix + name, self.tokens[first].start, self.tokens[self.at - 1].stop)

    def text(self, ahead: int = 0) -> str:
        """Return the token `ahead` of the current one, or an end token that ends every declaration."""
        return self.texts[self.at + ahead] if self.at + ahead < len(self.texts) else ";"

    def pass_group(self) -> None:
        """Skip to the token after the bracket that closes the current one."""
        opening, closing, depth = self.text(), _CLOSING[self.text()], 0
        while True:
            depth += (self.texts[self.at] == opening) - (self.texts[self.at] == closing)
            self.at += 1
            if depth == 0:
                return

    def pass_angles(self) -> None:
        """Skip the parameters of a template, whose defaults may contain expressions in parentheses."""
        depth = 0
        while True:
            text = self.text()
            depth += (text == "<") - (text == ">") - 2 * (text == ">>")
            if text in _CLOSING:
                self.pass_group()
            else:
                self.at += 1
            if depth <= 0:
                return

    def pass_to_semicolon(self) -> None:
        while self.at < len(self.texts) and self.text() != ";":
            if self.text() in _CLOSING:
                self.pass_group()
            elif self.text() == "}":
                return
            else:
                self.at += 1
        self.at += 1

    def type_name(self) -> str:
        self.at += 1
        while True:
            text = self.text()
            if text in ("alignas", "__align__"):
                self.at += 1
                self.pass_group()
            elif text in ("class", "struct"):
                self.at += 1
            else:
                return text if text not in ("{", ":", ";") else ""

    def function_name(self) -> str:
        """Skip to the body of a function, and return its name; or skip a declaration without a body."""
        name, operator = "", -1
        while self.at < len(self.texts):
            text = self.text()
            if text == ";":
                self.at += 1
                return ""
            if text == "}":
                return ""
            if text == "{":
                if name:
                    return name
                self.pass_group()
            elif text == "=" and operator != self.at - 1:
                self.pass_to_semicolon()
                return ""
            elif text == ":" and self.texts[self.at - 1] in ("public", "private", "protected"):
                self.at += 1
                return ""
            elif text == ":" and name:
                self.pass_initializers()
            elif text in ("(", "["):
                before = self.tokens[self.at - 1]
                if not name and text == "(" and operator >= 0 and self.at > operator + 1:
                    name = "".join(self.texts[operator : self.at])
                elif not name and text == "(" and before.kind == "name" and before.text not in _NO_NAMES:
                    name = before.text
                self.pass_group()
            else:
                if text == "operator":
                    operator = self.at
                self.at += 1
        return ""

    def pass_initializers(self) -> None:
        """Skip the initializers of a constructor: `: a(x), b{y}`."""
        while True:
            self.at += 1
            while self.text() not in ("(", "{"):
                self.at += 1
            self.pass_group()
            if self.text() != ",":
                return


def _cuda_spans(text: str) -> Iterator[Span]:
    declarations = _Declarations(text)
    yield from declarations.spans()
    if declarations.at < len(declarations.texts):
        raise SyntaxError(f"a brace closes what none opened: {declarations.tokens[declarations.at - 1]}")
