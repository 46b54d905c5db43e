"""A random sample of this repository's prose, for a reader who wrote none of it.

    python tests/repository/reading_sample.py draw SAMPLE.csv        draws 60 items of code and 60 of pages and errors
    python tests/repository/reading_sample.py draw SAMPLE.csv --seed 7
    python tests/repository/reading_sample.py count SAMPLE.csv       counts the verdicts

Without --seed, the seed comes from the system's entropy, so that nobody can know it in advance. The reader fills in the
column `verdict` with pass, marginal or fail, and the column `reason` if the verdict is not pass. An item passes if it
is standard technical English, and an engineer who knows NumPy and CUDA, but not this project, understands it next to
its code. `experiments/results/reading_sample.csv` has the last sample with its verdicts.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import random
import re
import secrets
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plain_english import ROOT, files

GROUPS = ("code", "pages and errors")
DIRECTIVE = re.compile(r"#\s*(?:type:|noqa|fmt:|pragma|codespell|!)")
CLOSED = re.compile(r"namespace\b")  # the comment that closes a namespace in a CUDA file
COLUMNS = ("group", "path", "line", "text", "verdict", "reason", "seed")


class Item(NamedTuple):
    """A text and its position in the repository."""

    group: str
    path: str
    line: int
    text: str


def python_items(path: Path, text: str) -> Iterator[Item]:
    """Yield the docstrings, comments and error texts of a Python file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node):
                yield Item("code", str(path), getattr(node, "lineno", 1), docstring.partition("\n\n")[0])
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            error = node.exc.args[0]
            if isinstance(error, (ast.Constant, ast.JoinedStr)) and path.parts[0] == "cuflash":
                yield Item("pages and errors", str(path), node.lineno, ast.unparse(error))
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            if block and (block[-1].start[0] + 1 != token.start[0] or block[-1].start[1] != token.start[1]):
                yield comment(path, block)
                block = []
            block.append(token)
    if block:
        yield comment(path, block)


def comment(path: Path, block: list[tokenize.TokenInfo]) -> Item:
    """Return the item of a comment, which may span several lines."""
    text = " ".join(token.string.lstrip("#").strip() for token in block)
    return Item("code", str(path), block[0].start[0], text)


def kernel_items(path: Path, text: str) -> Iterator[Item]:
    """Yield the comments of a CUDA file; adjacent comment lines form one item."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        before, slashes, after = line.partition("//")
        is_whole_line = slashes and not before.strip()
        if block and not is_whole_line:
            yield Item("code", str(path), block[0][0], " ".join(words for _, words in block))
            block = []
        if is_whole_line:
            block.append((number, after.strip()))
        elif slashes and not CLOSED.match(after.strip()):
            yield Item("code", str(path), number, after.strip())


def page_items(path: Path, text: str) -> Iterator[Item]:
    """Yield the sentences of a page, without code, tables, headings and directives."""
    blank = re.sub(r"^(`{3,}|:{3,}).*?^\1\s*$", lambda match: "\n" * match[0].count("\n"), text, flags=re.M | re.S)
    line = 1
    for paragraph in re.split(r"(\n(?:\s*\n)?(?=\s*(?:[-*]|\d+\.) )|\n\s*\n)", blank):
        content = re.sub(r"^(?:[-*]|\d+\.) +", "", paragraph.strip())
        if content and content[0] not in "#|<:`(!" and re.search(r"[a-z] [a-z]", content):
            for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])", " ".join(content.split())):
                yield Item("pages and errors", str(path), line, sentence)
        line += paragraph.count("\n")


def items() -> list[Item]:
    """Return all texts of the repository from which samples are drawn."""
    kinds = {".py": python_items, ".cu": kernel_items, ".cuh": kernel_items, ".md": page_items}
    texts = ((path, kinds[path.suffix]) for path in files() if path.suffix in kinds)
    return [item for path, split in texts for item in split(path, (ROOT / path).read_text("utf-8"))]


def draw(path: Path, seed: int, size: int = 60) -> None:
    """Write a sample of each group, without verdicts."""
    every, rng = items(), random.Random(seed)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for group in GROUPS:
            for item in rng.sample([item for item in every if item.group == group], size):
                writer.writerow([*item, "", "", seed])


def count(path: Path) -> None:
    """Print how many items of each group have each verdict."""
    with path.open(encoding="utf-8", newline="") as file:
        counts = Counter((row["group"], row["verdict"] or "not read") for row in csv.DictReader(file))
    for (group, verdict), number in sorted(counts.items()):
        print(f"{group:18} {verdict:10} {number}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("draw", "count"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, help="seed of the sample; from the system's entropy by default")
    arguments = parser.parse_args()
    if arguments.action == "draw":
        draw(arguments.path, secrets.randbits(32) if arguments.seed is None else arguments.seed)
    else:
        count(arguments.path)


if __name__ == "__main__":
    main()
