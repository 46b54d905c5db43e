"""Renames identifiers in the sources and in the faults planted in them, all at once.

    python tests/repository/renaming.py TABLE [--dry-run]

A table has a line for each name: the old one, the new one, and what else there is to say.

    parity    phase          in=kernels_cu/tile/*.cuh,kernels_cu/sm90 comments
    turn      state          in=kernels_cu/sm90/backward.cu:consume,tests/support/probes/ring.cu
    kTurns    kMmaSteps      in=kernels_cu/sm80 collides  # the rest of a line is a comment

Only whole identifiers are renamed, where nothing else is said in all files: kernels_cu/, cuflash/, tests/ and
experiments/. A scope is a file, a folder or a pattern, and may name a function or class of it. Words of a line:

    comments   in comments too
    strings    in strings too, among them docstrings, and the names of included files
    pages      in the code that *.md quotes between backticks too
    elsewhere  the new name may stand in files that do not have the old one
    collides   the new name may stand beside the old one: both are meant to be one from now on

Where scopes of one name overlap, the smaller one counts. Nothing is written if anything is wrong: a new name that is
there already, an old one that stands nowhere, a fault that would fit no more. Types are not known: a name of another
library that is spelt alike is renamed too, unless the scope leaves it out. Files are not moved.
"""

from __future__ import annotations

import argparse
import ast
import json
import keyword
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lexing import Language, Token, language_of, lexed, spans, tokens
from mutations.planting import Edit, places

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "kernels_cu/**/*.cu", "kernels_cu/**/*.cuh", "cuflash/**/*.py", "cuflash/sim/**/*.cuh", "cuflash/sim/**/*.hpp",
    "cuflash/sim/**/*.cpp", "tests/**/*.py", "tests/**/*.cu", "experiments/**/*.py", "*.md", "docs/**/*.md",
)  # fmt: skip
WIDTH = 120  # of a line of Python

_WORDS = re.compile(r"\\.|\w+", re.DOTALL)
_CODE_OF_PAGES = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_FORMATTED = re.compile(r"(?i:f|rf|fr)['\"]")
# Those that a name might have by mistake.
_KEYWORDS_OF_CUDA = frozenset(
    "auto bool case char const constexpr default delete do double enum explicit extern float goto inline int long "
    "namespace new operator private protected public register short signed sizeof static struct switch template this "
    "typedef typename union unsigned using virtual void volatile".split()
)
_OPTIONS = ("comments", "strings", "pages", "elsewhere", "collides")


class Rename(NamedTuple):
    old: str
    new: str
    scope: tuple[str, ...] = ()  # "file", "folder" or "pattern", and maybe ":function"; all files if there is none
    options: frozenset[str] = frozenset()


class Change(NamedTuple):
    start: int
    stop: int
    text: str


class Refused(Exception):
    """Everything that is wrong with a table."""


def read_table(text: str) -> list[Rename]:
    """The renames of a table, a line each."""
    renames, wrong = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        names, rest = words[:2], words[2:]
        scopes = [each.removeprefix("in=") for each in rest if each.startswith("in=")]
        options = {each for each in rest if not each.startswith("in=")}
        if len(names) < 2 or not all(each.isidentifier() for each in names) or is_keyword(names[1]):
            wrong.append(f"line {number}: an old and a new identifier come first: {line!r}")
        elif options - set(_OPTIONS):
            wrong.append(f"line {number}: {', '.join(sorted(options - set(_OPTIONS)))} is no option")
        else:
            scope = tuple(part for each in scopes for part in each.split(","))
            renames.append(Rename(names[0], names[1], scope, frozenset(options)))
    if wrong:
        raise Refused("\n".join(wrong))
    return renames


def is_keyword(name: str) -> bool:
    return keyword.iskeyword(name) or name in _KEYWORDS_OF_CUDA


class Source:
    """A file, and which names change where in it."""

    def __init__(self, root: Path, path: Path, renames: Iterable[Rename]) -> None:
        self.path, self.name = path, path.relative_to(root).as_posix()
        self.text, self.language, self.is_page = path.read_text("utf-8"), language_of(path), path.suffix == ".md"
        self.regions: dict[str, list[tuple[int, int, int, Rename]]] = defaultdict(list)  # size, start, stop
        for rename in renames:
            for size, start, stop in self._regions(rename):
                self.regions[rename.old].append((size, start, stop, rename))
        for regions in self.regions.values():
            regions.sort(key=lambda region: region[0])

    def _regions(self, rename: Rename) -> Iterator[tuple[int, int, int]]:
        whole = len(self.text)
        if not rename.scope:
            yield whole + 2, 0, whole
        for scope in rename.scope:
            pattern, _, function = scope.partition(":")
            if not (fnmatch(self.name, pattern) or self.name.startswith(f"{pattern.rstrip('/')}/")):
                continue
            if not function:
                yield whole + 1, 0, whole
            elif re.search(rf"\b{re.escape(function.split('.')[-1])}", self.text):
                for span in spans(self.text, self.language):
                    if span.has_name(function):
                        yield span.stop - span.start, span.start, span.stop

    def rename_at(self, at: int, name: str) -> Rename | None:
        """Return the new form of a name at a place."""
        found = [region for region in self.regions.get(name, ()) if region[1] <= at < region[2]]
        if not found or (self.language == "python" and keyword.iskeyword(name)):
            return None
        if len({region[3].new for region in found if region[0] == found[0][0]}) > 1:
            raise Refused(f"{self.name}: {name} has two new names in one scope")
        return found[0][3]

    @cached_property
    def has_names(self) -> bool:
        words = set(re.findall(r"\w+", self.text))
        return any(old in words for old in self.regions)

    def changes(self) -> list[Change]:
        if not self.has_names:
            return []
        if self.is_page:
            return [each for code in _CODE_OF_PAGES.finditer(self.text)
                    for each in self.of_words(code[0], code.start(), None, "pages")]  # fmt: skip
        return [each for token in lexed(self.text, self.language) for each in self.of_token(token, token.start)]

    def of_token(self, token: Token, start: int, at: int | None = None) -> Iterator[Change]:
        """Changes of a token that starts at a place of some text. `at`: the place of this file whose names count."""
        if token.kind == "name":
            rename = self.rename_at(start if at is None else at, token.text)
            if rename:
                yield Change(start, start + len(token.text), rename.new)
        elif token.kind == "comment":
            yield from self.of_words(token.text, start, at, "comments")
        else:
            for is_code, first, last in parts_of_string(token.text, self.language) if token.kind == "string" else ():
                if is_code:
                    for each in lexed(token.text[first:last], "python"):
                        yield from self.of_token(each, start + first + each.start, at)
                else:
                    yield from self.of_words(token.text[first:last], start + first, at, "strings")

    def of_words(self, text: str, start: int, at: int | None, option: str) -> Iterator[Change]:
        """Changes within a comment, a string or the code of a page, of those names that say so."""
        for word in _WORDS.finditer(text):
            if word[0] in self.regions:
                rename = self.rename_at(start + word.start() if at is None else at, word[0])
                if rename and option in rename.options:
                    yield Change(start + word.start(), start + word.end(), rename.new)

    def renamed_fragment(self, text: str, at: int) -> str:
        """A text that is not of this file, with the names that count at a place of this file."""
        fragment = lexed(text, self.language)
        return applied(text, (each for token in fragment for each in self.of_token(token, token.start, at)))

    def names(self) -> Iterator[tuple[str, int]]:
        """Identifiers and where they stand, in formatted strings too."""
        for token in tokens(self.text, self.language):
            if token.kind == "name":
                yield token.text, token.start
            elif token.kind == "string":
                for is_code, first, last in parts_of_string(token.text, self.language):
                    for each in tokens(token.text[first:last], "python") if is_code else ():
                        if each.kind == "name":
                            yield each.text, token.start + first + each.start


def parts_of_string(text: str, language: Language) -> Iterator[tuple[bool, int, int]]:
    """Return start and stop of the parts of a string's source, after its prefix, and whether each is a field's code."""
    at = first = re.search("['\"<]", text).start()  # type: ignore[union-attr]
    if language != "python" or not _FORMATTED.match(text):
        yield False, first, len(text)
        return
    while at < len(text):
        if text[at : at + 2] in ("{{", "}}"):
            at += 2
        elif text[at] == "{":
            yield False, first, at
            at = first = at + 1
            depth, quote = 0, ""
            while depth or text[at] not in "}:!" or quote or text[at : at + 2] == "!=":
                if quote:
                    quote = "" if text[at] == quote else quote
                elif text[at] in "'\"":
                    quote = text[at]
                else:
                    depth += (text[at] in "([{") - (text[at] in ")]}")
                at += 2 if not quote and text[at : at + 2] == "!=" else 1
            yield True, first, at
            first = at  # fields of a format start as all do
        else:
            at += 1
    yield False, first, len(text)


def applied(text: str, changes: Iterable[Change]) -> str:
    parts, at = [], 0
    for change in sorted(changes):
        parts += [text[at : change.start], change.text]
        at = change.stop
    return "".join([*parts, text[at:]])


# ---- faults ----


class Fault(NamedTuple):
    """An `Edit(...)` in a source of tests, and where it stands."""

    edit: Edit
    file: Token  # as it is written: a literal, or a constant's name
    start: int
    stop: int


def faults_of(text: str) -> list[Fault]:
    """Those of a module of tests; all but their files are literals."""
    if "Edit(" not in text:
        return []
    tree = ast.parse(text)
    starts = [0, *(end.end() for end in re.finditer("\n", text))]
    lines = text.split("\n")

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    constants = dict(_constants(tree))
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Edit"):
            continue
        literals = [each.value for each in node.args[1:] if isinstance(each, ast.Constant)]
        if not literals:  # Edit(*edit), and what makes edits of edits
            continue
        function, anchor, replacement = literals if len(literals) == 3 else (0, 0, 0)
        if not (isinstance(function, str | None) and isinstance(anchor, str) and isinstance(replacement, str)):
            raise Refused(f"line {node.lineno}: the function, anchor and replacement of a fault must be literals")
        first = node.args[0]
        file = constants.get(first.id) if isinstance(first, ast.Name) else ast.literal_eval(first)
        assert file and node.end_lineno and node.end_col_offset and first.end_lineno and first.end_col_offset
        start, stop = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        starts_at = offset(first.lineno, first.col_offset)
        token = Token(text[starts_at : offset(first.end_lineno, first.end_col_offset)], starts_at, "name")
        found.append(Fault(Edit(file, function, anchor, replacement), token, start, stop))
    return sorted(found, key=lambda fault: fault.start)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of strings at the top of a module: `_A = "a"`, and `_A, _B = "a", "b"`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            names, values = ([*each.elts] if isinstance(each, ast.Tuple) else [each] for each in (target, value))
            for name, each in zip(names, values):
                if isinstance(name, ast.Name) and isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield name.id, each.value


def renamed_edit(edit: Edit, source: Source) -> Edit:
    """The same fault in the renamed file."""
    language = source.language
    if not source.regions:
        return edit
    try:
        found = places(source.text, edit.anchor, edit.function, language=language)
    except LookupError:
        found = []
    of_text = tokens(source.text, language)
    at = of_text[found[0][0]].start if found else 0
    if found:  # each token of the anchor becomes what it becomes in the file
        pairs = zip(tokens(edit.anchor, language), (of_text[number] for number in found[0]))
        anchor = applied(edit.anchor, (
            each for own, other in pairs for each in source.of_token(own, own.start, other.start)
        ))  # fmt: skip
    else:
        anchor = source.renamed_fragment(edit.anchor, at)
    function = edit.function
    if function is not None:
        held = [span.start for span in spans(source.text, language) if span.has_name(function) and span.start <= at]
        function = ".".join(
            rename.new if (rename := source.rename_at(max(held, default=at), part)) else part
            for part in function.split(".")
        )
    return Edit(edit.file, function, anchor, source.renamed_fragment(edit.replacement, at))


def written(edit: Edit, file: str, indent: int, column: int) -> str:
    """The source of an edit that starts in a column of a line of some indentation; one character follows it."""
    pad = " " * indent
    parts = [file, "None" if edit.function is None else literal(edit.function), *map(literal, edit[2:])]
    if column + len(line := f"Edit({', '.join(parts)})") < WIDTH:
        return line
    if indent + 4 + len(line := ", ".join(parts)) <= WIDTH:
        return f"Edit(\n{pad}    {line}\n{pad})"
    lines = [f"{parts[0]}, {parts[1]},"]
    for each in (edit.anchor, edit.replacement):
        *before, last = pieces(each, WIDTH - indent - 5)
        lines += [*before, f"{last},"]
    return "\n".join(["Edit(", *(f"{pad}    {line}" for line in lines), f"{pad})"])


def literal(text: str) -> str:
    """In double quotes, unless the text has such and no single ones."""
    if '"' in text and "'" not in text:
        return repr(text)
    return json.dumps(text, ensure_ascii=False)


def pieces(text: str, width: int) -> list[str]:
    """Literals no wider than that, which stand for one text together; cut after spaces."""
    found, rest = [], text
    while len(literal(rest)) > width:
        cuts = [at for at in range(1, len(rest)) if rest[at - 1] == " " and len(literal(rest[:at])) <= width]
        if not cuts:
            break
        found.append(literal(rest[: cuts[-1]]))
        rest = rest[cuts[-1] :]
    return [*found, literal(rest)]


# ---- all of it ----


class Result(NamedTuple):
    texts: dict[Path, str]  # of the files that change
    report: list[str]


def renamed(root: Path, renames: Sequence[Rename]) -> Result:
    """Return the new text of all files, or raise an error that lists everything that is wrong."""
    paths = sorted({path for pattern in PATTERNS for path in root.glob(pattern)})
    sources = {path: Source(root, path, renames) for path in paths}
    wrong = [*_without_effect(renames, sources.values()), *_collisions(renames, sources.values())]
    if wrong:
        raise Refused("\n".join(wrong))
    new = {path: source.changes() for path, source in sources.items()}
    texts = {path: applied(sources[path].text, changes) for path, changes in new.items() if changes}
    report = [f"{sources[path].name}: {len(new[path])} names" for path in texts]
    num_faults, kept = 0, {}
    for path, source in sources.items():
        if not source.name.startswith("tests/") or path.suffix != ".py":
            continue
        faults = faults_of(source.text)
        kept[path] = [(fault.start, fault.stop) for fault in faults]
        own = [each for each in new[path] if not any(start <= each.start < stop for start, stop in kept[path])]
        for fault in faults:
            folder = "cuflash" if language_of(fault.edit.file) == "python" else "kernels_cu"
            target = sources.get(root / folder / fault.edit.file)
            if target is None:
                continue
            edit = renamed_edit(fault.edit, target)
            wrong += _misfit(fault.edit, edit, target, texts.get(target.path, target.text))
            file = applied(fault.file.text, source.of_token(fault.file, 0, fault.file.start))
            if (edit, file) != (fault.edit, fault.file.text):
                start = source.text.rfind("\n", 0, fault.start) + 1
                indent = len(source.text[start:]) - len(source.text[start:].lstrip())
                own.append(Change(fault.start, fault.stop, written(edit, file, indent, fault.start - start)))
                num_faults += edit != fault.edit
        if own:
            texts[path] = applied(source.text, own)
        else:
            texts.pop(path, None)
    if wrong:
        raise Refused("\n".join(wrong))
    report.append(f"{num_faults} faults")
    report += _long_lines(root, sources, texts)
    return Result(texts, [*report, *_left(sources.values(), new, kept)])


def _without_effect(renames: Iterable[Rename], sources: Iterable[Source]) -> Iterator[str]:
    words = {source: set(re.findall(r"\w+", source.text)) for source in sources}
    for rename in renames:
        if not any(rename.old in found and any(region[3] is rename for region in source.regions.get(rename.old, ()))
                   for source, found in words.items()):  # fmt: skip
            yield f"{rename.old} stands nowhere in {', '.join(rename.scope) or 'any file'}"


def _collisions(renames: Iterable[Rename], sources: Iterable[Source]) -> Iterator[str]:
    """New names that stand in a scope already and stay there, and those that two old names get in one file."""
    beside: dict[Rename, list[str]] = defaultdict(list)
    elsewhere: dict[Rename, list[str]] = defaultdict(list)
    new_names = {rename.new for rename in renames}
    for source in sources:
        words = set(re.findall(r"\w+", source.text))
        if source.is_page or (new_names.isdisjoint(words) and not source.has_names):
            continue
        stays: dict[str, list[int]] = defaultdict(list)  # where new names stand
        old_names: dict[str, set[str]] = defaultdict(set)  # by the new one
        renamed: set[Rename] = set()
        for name, at in source.names():
            rename = source.rename_at(at, name)
            if rename is not None:
                renamed.add(rename)
                if "collides" not in rename.options:
                    old_names[rename.new].add(name)
            elif name in new_names:
                stays[name].append(at)
        for old, regions in source.regions.items():
            for _, start, stop, rename in regions:
                within = [at for at in stays.get(rename.new, ()) if start <= at < stop]
                if not within or "collides" in rename.options or (
                    rename not in renamed and "elsewhere" in rename.options
                ):
                    continue
                line = source.text.count("\n", 0, within[0]) + 1
                (beside if rename in renamed else elsewhere)[rename].append(f"{source.name}:{line}")
        for new, names in old_names.items():
            if len(names) > 1:
                yield f"{', '.join(sorted(names))} would all be {new} in {source.name}"
    for found, how in ((beside, "beside the old one"), (elsewhere, "without the old one")):
        for rename, where in found.items():
            yield f"{rename.old} -> {rename.new}: the new name stands {how} in {', '.join(dict.fromkeys(where))}"


def _misfit(before: Edit, after: Edit, target: Source, text: str) -> Iterator[str]:
    """A fault that fitted once and would no more."""
    try:
        before.planted_in(target.text)
    except (LookupError, ValueError):
        return
    try:
        after.planted_in(text)
    except (LookupError, ValueError, SyntaxError) as error:
        yield f"a fault would fit no more: {error}"


def _long_lines(root: Path, sources: dict[Path, Source], texts: dict[Path, str]) -> Iterator[str]:
    for path, text in texts.items():
        if path.suffix == ".py":
            known = set(sources[path].text.split("\n"))
            for number, line in enumerate(text.split("\n"), 1):
                if len(line) > WIDTH and line not in known:
                    yield f"{sources[path].name}:{number}: a line of {len(line)} characters"


def _left(
    sources: Iterable[Source], new: dict[Path, list[Change]], faults: dict[Path, list[tuple[int, int]]]
) -> Iterator[str]:
    """Return the places of old names in comments, strings and pages, by name."""
    left: dict[str, Counter[str]] = defaultdict(Counter)
    for source in sources:
        if source.has_names:
            gone = {change.start for change in new[source.path]}
            for word in re.finditer(r"\w+", source.text):
                at = word.start()
                if word[0] not in source.regions or at in gone or not source.rename_at(at, word[0]):
                    continue
                if not any(start <= at < stop for start, stop in faults.get(source.path, ())):
                    left[word[0]][source.name] += 1
    for name, found in left.items():
        yield f"left in comments and strings: {name}: {', '.join(f'{file} ({n})' for file, n in found.items())}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    try:
        result = renamed(ROOT, read_table(arguments.table.read_text("utf-8")))
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(result.report))
    if not arguments.dry_run:
        for path, text in result.texts.items():
            path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
