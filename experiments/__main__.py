"""Run an experiment, or list all of them with their questions.

    python -m experiments                           # the names, each with the question that it answers
    python -m experiments block_sparsity --help     # the flags of one
    python -m experiments block_sparsity            # run it

It is called in the folder of a clone, with the packages of ``pip install -e '.[experiments]'``.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SUBJECTS = {
    "sparsity": "Block sparsity", "speed": "Speed and memory", "proof": "Correctness", "language": "A language model",
    "support": "Tables and pictures of the pages",
}  # fmt: skip


def scripts(folder: Path) -> dict[str, Path]:
    """Files of a folder that are run, by name; a file without a ``__main__`` block is imported by others."""
    found = {path.stem: path for path in sorted(folder.glob("*.py"))}
    return {name: path for name, path in found.items() if 'if __name__ == "__main__":' in path.read_text("utf-8")}


def question(path: Path) -> str:
    """First line of a script's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]


def listing() -> str:
    """All scripts by subject, each with its question."""
    lines = []
    for folder, subject in SUBJECTS.items():
        lines.append(f"\n{subject}")
        lines += [f"  {name:20} {question(path)}" for name, path in scripts(FOLDER / folder).items()]
    return "\n".join(lines)[1:]


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing(), "\n\nRun one: python -m experiments NAME [--help]", sep="")
        return 0
    name, *flags = arguments
    found = {stem: path for folder in SUBJECTS for stem, path in scripts(FOLDER / folder).items()}
    if name not in found:
        print(f"no experiment is named {name!r}; there are {', '.join(sorted(found))}", file=sys.stderr)
        return 2
    sys.path[:0] = [str(FOLDER / folder) for folder in SUBJECTS]
    sys.argv = [str(found[name]), *flags]
    runpy.run_path(str(found[name]), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
