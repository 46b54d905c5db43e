"""Checks of the language of this repository: words, first lines of docstrings, and names.

    python tests/repository/plain_english.py               fails if a folder has more violations than its allowance
    python tests/repository/plain_english.py --list PATH   prints the violations below a path
    python tests/repository/plain_english.py --lower       lowers the allowances to what the folders have now

`words.txt` is codespell's dictionary of words and phrases with their replacements; `verbs.txt` lists the verbs with
which docstrings of functions may start; `allowances.csv` has the number of violations that each folder may have. These
numbers may only fall. `# codespell:ignore` at the end of a line excludes the line.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = ("cuflash", "kernels_cu", "docs", "tests", "experiments")
PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".cu", ".cuh", ".hpp", ".cpp", ".md", ".rst"}
GENERATED = {"_build", "generated", "gallery", "__pycache__"}
WORDS = Path(__file__).with_name("words.txt")
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text("utf-8").split())
ALLOWANCES = Path(__file__).with_name("allowances.csv")
KINDS = ("words", "docstrings", "names")

# Words that may start a noun phrase although they are verbs, too.
ALSO_NOUNS = {
    "answer", "block", "bound", "build", "cache", "call", "change", "check", "copy", "count", "draw", "end", "estimate",
    "fit", "group", "launch", "limit", "list", "load", "map", "mark", "mask", "match", "measure", "name", "order",
    "plan", "print", "queue", "rank", "record", "repeat", "report", "request", "result", "round", "run", "sample",
    "scale", "schedule", "set", "share", "sort", "start", "state", "stop", "store", "sum", "sweep", "test", "time",
    "trace", "transform", "try", "turn", "use", "wait", "work",
}  # fmt: skip
CLAUSES = {"how", "if", "what", "when", "where", "whether", "which", "who", "whose", "why", "does", "do", "is", "are"}
BAD_NAMES = {"asked", "found", "given", "here", "kept", "made", "there", "told"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Violation(NamedTuple):
    """A place in a file that breaks a rule."""

    path: Path
    line: int
    kind: str
    text: str

    @property
    def folder(self) -> str:
        """The folder whose allowance counts this violation, such as `cuflash/masks`."""
        return "/".join(self.path.parts[: min(2, len(self.path.parts) - 1)]) or "."


def files() -> list[Path]:
    """Return the files whose language is checked, relative to the root."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    relative = sorted(path.relative_to(ROOT) for path in [*inside, *(ROOT / page for page in PAGES)])
    return [path for path in relative if not GENERATED & set(path.parts)]


def phrases_pattern() -> str:
    """Return the regular expression with which codespell finds the words and phrases of its dictionary.

    "There is no" and "is no longer" are accepted.
    """
    phrases = [line.partition("->")[0] for line in WORDS.read_text("utf-8").splitlines()]
    alternatives = "|".join(re.escape(phrase) for phrase in sorted(phrases, key=len, reverse=True))
    return rf"(?i)(?<!there )\b(?:{alternatives})\b(?! (?:longer|more|less)\b)"


def word_violations(paths: list[Path], root: Path = ROOT) -> Iterator[Violation]:
    """Yield the violations that codespell reports."""
    command = [sys.executable, "-m", "codespell_lib", "-D", str(WORDS), "--regex", phrases_pattern(), *map(str, paths)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if result.returncode not in (0, 65):  # 65: some words were found
        raise RuntimeError(result.stderr)
    for line in result.stdout.splitlines():
        if report := re.fullmatch(r"(.+?):(\d+): (.+)", line):
            yield Violation(Path(report[1]), int(report[2]), "words", report[3])


def is_property(node: ast.AST) -> bool:
    decorators = map(ast.unparse, node.decorator_list) if isinstance(node, Function) else ()
    return any(decorator.rpartition(".")[2] in ("property", "cached_property") for decorator in decorators)


def docstring_fault(node: ast.AST) -> str | None:
    """Return the rule that the docstring of a module, class or function breaks, or None."""
    if not isinstance(node, (ast.Module, ast.ClassDef, Function)) or not (docstring := ast.get_docstring(node)):
        return None
    first_line = docstring.partition("\n")[0]
    first_word = re.split(r"[^\w'-]", first_line)[0].lower()
    is_function = isinstance(node, Function) and not is_property(node)
    if not docstring.partition("\n\n")[0].endswith((".", ":", "?")):
        return f"no period after: {first_line}"
    if is_function and node.name.startswith("test_"):
        return None  # says what is true if the test passes
    if is_function and first_word not in VERBS and not first_line.startswith("True if"):
        return f"not a verb of verbs.txt: {first_line}"
    singular = {first_word, first_word.removesuffix("s"), first_word.removesuffix("es")}
    is_question = re.match(r"(?:[^.]|\.\S)*\?", docstring) is not None  # the question that an experiment answers
    if not is_function and not is_question and (first_word in CLAUSES or singular & VERBS - ALSO_NOUNS):
        return f"not a noun phrase: {first_line}"
    return None


def defined_names(node: ast.AST) -> Iterator[str]:
    """Yield the names of variables, arguments, attributes, functions and classes that a node defines."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name


def syntax_violations(path: Path, text: str) -> Iterator[Violation]:
    """Yield the violations of a Python file's docstrings and names."""
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 1)
        if fault := docstring_fault(node):
            yield Violation(path, line, "docstrings", fault)
        for name in defined_names(node):
            if name in BAD_NAMES:
                yield Violation(path, line, "names", f"{name} does not say what the value is")


def violations(paths: list[Path]) -> list[Violation]:
    """Return all violations in files of the repository."""
    modules = [path for path in paths if path.suffix == ".py"]
    syntax = (each for path in modules for each in syntax_violations(path, (ROOT / path).read_text("utf-8")))
    return sorted([*word_violations(paths), *syntax])


def allowances() -> Counter[tuple[str, str]]:
    """Read how many violations of each kind a folder may have."""
    with ALLOWANCES.open(encoding="utf-8", newline="") as file:
        return Counter({(row["folder"], kind): int(row[kind]) for row in csv.DictReader(file) for kind in KINDS})


def write_allowances(counts: Counter[tuple[str, str]]) -> None:
    """Write the allowances of all folders that have violations."""
    with ALLOWANCES.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["folder", *KINDS])
        for folder in sorted({folder for (folder, _), count in counts.items() if count}):
            writer.writerow([folder, *(counts[folder, kind] for kind in KINDS)])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="PATH", type=Path, help="print the violations below a path")
    parser.add_argument("--lower", action="store_true", help="lower the allowances to the current numbers")
    arguments = parser.parse_args()
    if arguments.list:
        below = Path(arguments.list).resolve().relative_to(ROOT)
        reported = violations([path for path in files() if path.is_relative_to(below)])
    else:
        every, allowed = violations(files()), allowances()
        counts = Counter((each.folder, each.kind) for each in every)
        if arguments.lower:
            write_allowances(counts & allowed)
        reported = [each for each in every if counts[each.folder, each.kind] > allowed[each.folder, each.kind]]
        for key in sorted({(each.folder, each.kind) for each in reported}):
            print(f"{key[0]} has {counts[key]} violations of the rules of {key[1]}; {allowed[key]} are allowed:")
        if counts < allowed and not arguments.lower:
            print(f"some folders have fewer violations than allowed: {sys.executable} {Path(__file__).name} --lower")
    for each in reported:
        print(f"{each.path}:{each.line}: {each.kind}: {each.text}")
    return bool(reported)


if __name__ == "__main__":
    sys.exit(main())
