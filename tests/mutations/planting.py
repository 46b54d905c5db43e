"""Faults to plant in the library: edits that match by tokens, and a copy of the sources with one edit.

An edit names a file, the function that contains its anchor, the anchor, and its replacement. The anchor is matched by
its tokens: comments, white space and line ends do not matter. An edit whose anchor is missing or ambiguous fails, so
that tables of edits stay up to date with the code.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import cuflash
from cuflash.executors import sim as simulated
from cuflash.compiler import source as sources
from lexing import Language, Span, Token, language_of, lexed, spans, tokens

LIBRARY = Path(cuflash.__file__).parent


class Edit(NamedTuple):
    """A fault in a file of cuflash/, which also has files in C++, or of kernels_cu/."""

    file: str
    function: str | None  # or a class, or "Class.method"; None if no function contains the anchor
    anchor: str
    replacement: str

    @property
    def is_of_library(self) -> bool:
        """True if the file is in cuflash/."""
        return (LIBRARY / self.file).is_file()

    def path(self) -> Path:
        return (LIBRARY if self.is_of_library else sources.KERNELS) / self.file

    def planted_in(self, text: str) -> str:
        """Return a file's text with the fault."""
        language = language_of(self.file)
        try:
            return replaced(text, self.anchor, self.replacement, self.function, language=language)
        except LookupError as error:
            raise LookupError(f"{self.file}: {error}") from None


def places(text: str, anchor: str, function: str | None = None, *, language: Language) -> list[range]:
    """Return the positions of an anchor in a text, or in all functions with a name, as ranges of token numbers."""
    of_text, of_anchor = tokens(text, language), tokens(anchor, language)
    if not of_anchor:
        raise ValueError(f"{anchor!r} has no tokens")
    ranges = [range(at, at + len(of_anchor)) for at in _occurrences(of_text, of_anchor)]
    if function is None:
        return ranges
    named = [span for span in spans(text, language) if span.has_name(function)]
    if not named:
        raise LookupError(f"there is no {function}: bring the edit up to date")
    return [place for place in ranges if any(_holds(span, of_text, place) for span in named)]


def _occurrences(of_text: Sequence[Token], of_anchor: Sequence[Token]) -> Iterator[int]:
    first, length = of_anchor[0].text, len(of_anchor)
    wanted = [token.text for token in of_anchor]
    for at, token in enumerate(of_text):
        if token.text == first and [each.text for each in of_text[at : at + length]] == wanted:
            yield at


def _holds(span: Span, of_text: Sequence[Token], place: range) -> bool:
    return span.start <= of_text[place[0]].start and of_text[place[-1]].stop <= span.stop


def replaced(
    text: str, anchor: str, replacement: str, function: str | None = None, *, language: Language = "cuda"
) -> str:
    """Return the text with the anchor replaced; its tokens must occur exactly once in the function.

    `function` may also be a class or struct, or "Class.method"; None means the entire text. Lines of a replacement
    after the first are indented relative to the line where the anchor starts.
    """
    for each in (anchor, replacement):
        if any(token.kind == "comment" for token in lexed(each, language)):
            raise ValueError(f"{each!r} holds a comment, which is neither a fault nor an anchor")
    if [each.text for each in tokens(anchor, language)] == [each.text for each in tokens(replacement, language)]:
        raise ValueError(f"{anchor!r} is replaced by the same tokens")
    matches = places(text, anchor, function, language=language)
    if len(matches) != 1:
        where = "" if function is None else f" in {function}"
        raise LookupError(f"{anchor!r} stands {len(matches)} times{where}: bring the edit up to date")
    of_text = tokens(text, language)
    before, after = text[: of_text[matches[0][0]].start], text[of_text[matches[0][-1]].stop :]
    return before + _fitted(textwrap.dedent(replacement).strip(), before, after) + after


def _fitted(replacement: str, before: str, after: str) -> str:
    """Return a replacement with the indentation of its first line, separated from adjacent words and operators."""
    indent = re.match(r"[ \t]*", before[before.rfind("\n") + 1 :])
    assert indent is not None
    fitted = replacement.replace("\n", f"\n{indent[0]}")
    left, right = before[-1:], after[:1]
    if _would_join(left, fitted[:1] or right):
        fitted = f" {fitted}"
    return f"{fitted} " if fitted and _would_join(fitted[-1], right) else fitted


def _would_join(left: str, right: str) -> bool:
    """Return whether two characters might merge into one token."""
    if not left.strip() or not right.strip():
        return False
    is_word = [each.isalnum() or each in "_\"'" for each in (left, right)]
    return is_word[0] == is_word[1] and not {left, right} & set("()[]{},;")


def misfits(edits: Iterable[Edit]) -> list[str]:
    """List the errors of edits that no longer match the sources: the anchor is missing, or occurs twice."""
    wrong = []
    for edit in edits:
        try:
            edit.planted_in(edit.path().read_text("utf-8"))
        except (LookupError, ValueError) as error:
            wrong.append(str(error))
    return wrong


@contextmanager
def planted(folder: Path, edit: Edit) -> Iterator[None]:
    """Build kernels from a copy of the sources that contains the fault, within a `with` block."""
    original = sources.KERNELS
    shutil.copytree(original, folder, dirs_exist_ok=True)
    path = folder / edit.file
    path.write_text(edit.planted_in(path.read_text("utf-8")), "utf-8")
    try:
        sources.KERNELS = folder
        _forget()
        yield
    finally:
        sources.KERNELS = original
        _forget()


def _forget() -> None:
    sources.source.cache_clear()
    simulated._kernel.cache_clear()
