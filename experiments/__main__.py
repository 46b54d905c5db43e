"""Run an experiment, or list all of them with their questions, findings and costs.

    python -m experiments                           # the names, each with question, finding and cost
    python -m experiments block_sparsity --help     # the flags of one
    python -m experiments block_sparsity            # run it
    python -m experiments sweep crossover --help    # run it over many configurations, on several machines

Run it in the folder of a clone, after ``pip install -e '.[experiments]'``.
"""

from __future__ import annotations

import ast
import configparser
import os
import re
import runpy
import sys
import textwrap
from pathlib import Path

FOLDER = Path(__file__).parent
SUBJECTS = {
    "sparsity": "Block sparsity", "speed": "Speed and memory", "proof": "Correctness", "language": "A language model",
    "derivatives": "Derivatives in PyTorch", "sweeps": "Sweeps", "support": "Tables and pictures of the pages",
}  # fmt: skip


def scripts(folder: Path) -> dict[str, Path]:
    """Return the files of a folder that can be run, by name; files without a ``__main__`` block are imported."""
    paths = {path.stem: path for path in sorted(folder.glob("*.py"))}
    return {name: path for name, path in paths.items() if 'if __name__ == "__main__":' in path.read_text("utf-8")}


def summary(path: Path) -> dict[str, str]:
    """Return a script's question, and the paragraphs Found and Cost of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    parts = {"question": text.split("\n")[0]}
    for name in ("Found", "Cost"):
        part = re.search(rf"^{name}: (.*?)(?=^\w+:|^$|\Z)", text, re.MULTILINE | re.DOTALL)
        parts[name.lower()] = " ".join(part[1].split()) if part else ""
    return parts


def listing() -> str:
    """List all scripts by subject, each with its question, the first sentence of its finding, and its cost."""
    lines = []
    for folder, subject in SUBJECTS.items():
        lines.append(f"\n{subject}")
        for name, path in scripts(FOLDER / folder).items():
            paragraphs = summary(path)
            lines.append(f"  {name:22} {paragraphs['question']}")
            said = {"found": re.split(r"(?<=[.]) (?=[A-Z])", paragraphs["found"])[0], "cost": paragraphs["cost"]}
            wrapped = (textwrap.wrap(f"{key}: {text}", 92) for key, text in said.items() if text)
            lines += [f"{'':25}{line}" for part in wrapped for line in part]
    return "\n".join(lines)[1:]


def advice(module: str) -> str:
    """Return the command that installs a module: by the first extra of setup.cfg that lists it, or by its own name."""
    setup = configparser.ConfigParser()
    setup.read(FOLDER.parent / "setup.cfg", "utf-8")
    top = module.partition(".")[0]
    name = top.replace("_", "-").lower()
    for extra, listed in setup["options.extras_require"].items():
        packages = [re.split(r"[^\w.-]", line.lower().replace("_", "-"))[0] for line in listed.split("\n")]
        if any(package == name or package.startswith(f"{name}-") for package in packages):
            return f"pip install -e '.[{extra}]'"
    return f"pip install {top}"


def complaint(error: Exception) -> str | None:
    """Return a line that says what the machine lacks, or None for program errors and a closed output."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name in {path.stem for path in FOLDER.glob("*/*.py")}:
            return None
        return f"the module {error.name} is missing: {advice(error.name)}"
    return str(error) if type(error) is ImportError and error.name is None else None


def flags_of(path: Path) -> list[str]:
    """Return a line for each flag of an experiment, read from the source of its Config without importing it."""
    tree = ast.parse(path.read_text("utf-8"))
    configs = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config"]
    lines = []
    for node in (each for config in configs for each in config.body if isinstance(each, ast.AnnAssign)):
        default = node.value
        if isinstance(default, ast.Call):  # the default is inside field(default=...)
            default = next((word.value for word in default.keywords if word.arg == "default"), default)
        flag = "--" + ast.unparse(node.target).replace("_", "-")
        lines.append(f"  {flag:24} default {ast.unparse(default) if default else 'none'}")
    return lines


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing(), "\n\nRun one: python -m experiments NAME [--help]", sep="")
        return 0
    name, *flags = arguments
    known = {stem: path for folder in SUBJECTS for stem, path in scripts(FOLDER / folder).items()}
    if name not in known:
        print(f"no experiment is named {name!r}; there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    sys.path[:0] = [str(FOLDER / folder) for folder in SUBJECTS]
    sys.argv = [str(known[name]), *flags]
    try:
        runpy.run_path(str(known[name]), run_name="__main__")
    except (ImportError, OSError) as error:
        if (line := complaint(error)) is None:
            raise
        if {"-h", "--help"} & {*flags}:
            text = ast.get_docstring(ast.parse(known[name].read_text("utf-8"))) or ""
            print("\n".join([text, "", *flags_of(known[name])]).rstrip(), f"\n\nTo run it: {line}")
            return 0
        print(f"{name}: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `head` has stopped reading; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
