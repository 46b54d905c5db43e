"""``python -m cuflash study``: which block patterns keep the attention of one's own queries, keys and values."""

from __future__ import annotations

import argparse
import csv
import io
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, cast
from zipfile import BadZipFile

import numpy as np

from ..arrays import BFLOAT16, HALVES, Array
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from .families import FAMILIES, ORACLE
from .own_patterns import OwnPattern, is_own, loaded
from .survey import Case, Measurement, Survey

PATTERNS = (*FAMILIES, ORACLE)
_COLUMNS = ("study", "causal", "scale", *Measurement._fields)
_PICTURES = (".png", ".pdf", ".svg")
_PROGRAM = "python -m cuflash study"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage, and leave."""
        self.exit(2, f"{self.prog}: error: {message}\n")


@explains_keywords
def study_report(arguments: Sequence[str]) -> str:
    """Run ``python -m cuflash study``; measurements go to a CSV file as they are made, progress to stderr.

    Parameters
    ----------
    arguments : sequence of str
        The words after ``study``.

    Returns
    -------
    str
        How the arrays were read, a table for each block size, and why a row of it is empty.

    Raises
    ------
    SystemExit
        An argument, the archive or the CSV file is wrong: one line says what, and the status is 2. Status 1 if no
        pattern fits any density, and 130 after an interruption.

    Examples
    --------
    >>> import os, tempfile
    >>> import numpy as np
    >>> from cuflash.study import study_report
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "my.npz")
    ...     np.savez(path, q=q, k=k, v=v)
    ...     words = [path, "--patterns", "window", "--blocks", "8", "--densities", "0.5", "--csv", f"{path}.csv"]
    ...     print(study_report(words).splitlines()[0].split(": ")[-1])
    2 heads, 64 tokens, 8 dims
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    path = Path(given.csv or f"{Path(given.archive).stem}.study.csv")
    try:
        own = _check(given)
        arrays = load_heads(Path(given.archive), given.names)
        survey = Survey(*arrays, causal=given.causal, scale=given.scale, own=own)
        made = _recovered(path, survey.identity)
    except (UnsupportedProblem, TypeError, OSError) as error:
        parser.error("; ".join(getattr(error, "reasons", (str(error),))))
    read = f"{given.archive}: {read_as(arrays)}"
    print(read, file=sys.stderr, flush=True)
    known = {row.case: row for row in made}
    try:
        known |= {row.case: row for row in _surveyed(survey, given, path, known)}
    except UnsupportedProblem as error:  # of blocks of one's own
        parser.error("; ".join(error.reasons))
    except KeyboardInterrupt:
        parser.exit(130, f"\n{_PROGRAM}: interrupted; the same command continues from what {path} holds\n")
    rows = [known[Case(*case)] for case in _cases(given) if Case(*case) in known]
    if not rows:
        told = f"{given.archive} was read as {read_as(arrays)}: swap axes, or nothing fits"
        swap = "save q.swapaxes(-3, -2), and so k and v, if tokens come before heads; " * (arrays[0].ndim > 2)
        parser.exit(1, f"{_PROGRAM}: error: {told} ({swap}lower --blocks or raise --densities)\n")
    if given.plot is not None:
        _plot(rows, given.blocks, given.plot)
    tables = (_table(rows, block, given, survey) for block in given.blocks)
    return "\n\n".join([read, *tables, f"{len(rows)} rows in {path}"])


def read_as(arrays: Sequence[Array]) -> str:
    """How the axes of q, k and v are read, such as 1 x 12 heads, 512 tokens, 64 dims."""
    q, k, v = arrays
    *leading, tokens, dim = q.shape
    heads = f"{' x '.join(map(str, leading))} heads" if leading else "one head"
    if leading and k.shape[-3] != leading[-1]:
        heads += f" on {k.shape[-3]} of keys and values"
    values = f" ({v.shape[-1]} of values)" if v.shape[-1] != dim else ""
    return f"{heads}, {tokens} tokens, {dim} dims{values}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        _PROGRAM,
        description="how much of your attention block patterns keep, and at which density",
        epilog=f"example: {_PROGRAM} my.npz --patterns window oracle --blocks 32 64 --densities 0.25 0.5 --plot my.png",
    )
    parser.add_argument("archive", help="an .npz file with q, k and v, [..., heads, tokens, dim] or [tokens, dim]")
    parser.add_argument(
        "--names", nargs=3, default=["q", "k", "v"], metavar=("Q", "K", "V"), help="keys of arrays; q k v by default"
    )
    parser.add_argument(
        "--patterns", nargs="+", default=[*PATTERNS],
        help=f"of {', '.join(PATTERNS)}, all by default; also MODULE:NAME of a mask or of a function (q, k, *, block, "
        "density, causal) that returns one, and FILE.npz of booleans, one for each block",
    )
    parser.add_argument(
        "--blocks", nargs="+", type=_one(int), default=[64], help="sides of square blocks in tokens; 64 by default"
    )
    parser.add_argument(
        "--densities", nargs="+", type=_one(float), default=[0.125, 0.25, 0.5],
        help="maximum block densities; each pattern enters with its densest size within; 0.125 0.25 0.5 by default",
    )
    parser.add_argument("--causal", action="store_true", help="queries attend no later keys")
    parser.add_argument("--scale", type=float, help="of the scores; 1 / sqrt(dim) by default")
    parser.add_argument("--csv", help="file of all rows, which are not measured again; NAME.study.csv here by default")
    parser.add_argument("--plot", type=Path, help="a picture of recall over density, made by matplotlib")
    return parser


def _one(kind: type[float]) -> Callable[[str], float]:
    """Return a function that makes one number of a list of an argument's text."""

    def parse(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {kind.__name__}s with spaces between; got {text!r}") from None

    return parse


def _check(given: argparse.Namespace) -> dict[str, OwnPattern]:
    """Refuse options that no study can have, leave lists without repetitions, and return patterns of one's own."""
    given.patterns, given.blocks = list(dict.fromkeys(given.patterns)), list(dict.fromkeys(given.blocks))
    given.densities = sorted(set(given.densities))
    reasons = [
        f"--patterns must be of {', '.join(PATTERNS)}, with spaces between, MODULE:NAME or FILE.npz; got {name}"
        for name in given.patterns
        if name not in PATTERNS and not is_own(name)
    ]
    own = {}
    for name in filter(is_own, given.patterns):
        with collecting(reasons):
            own[name] = loaded(name)
    reasons += [f"--blocks must be positive; got {block}" for block in given.blocks if block < 1]
    reasons += [f"--densities must lie in (0, 1]; got {limit:g}" for limit in given.densities if not 0 < limit <= 1]
    if given.plot is not None and find_spec("matplotlib") is None:
        reasons.append("--plot needs matplotlib: pip install matplotlib, or leave it out")
    if given.plot is not None and given.plot.suffix not in _PICTURES:
        reasons.append(f"--plot must end with {', '.join(_PICTURES)}; got {given.plot}")
    if given.csv is not None and Path(given.csv).suffix.lower() != ".csv":
        reasons.append(f"--csv must end with .csv; got {given.csv}")
    for option, place in (("--csv", given.csv), ("--plot", given.plot)):
        if place is not None and not Path(place).parent.is_dir():
            reasons.append(f"{option} must be in a folder that exists; got {place}")
    refuse(reasons)
    return own


def _cases(given: argparse.Namespace) -> Iterable[tuple[int, str, float]]:
    return ((block, name, limit) for block in given.blocks for name in given.patterns for limit in given.densities)


def load_heads(path: Path, names: Sequence[str] = ("q", "k", "v")) -> list[Array]:
    """q, k and v of an archive; float16 and bfloat16 as float32, in which NumPy holds both exactly.

    Parameters
    ----------
    path : Path
        The .npz file.
    names : sequence of str
        The keys of q, k and v in it.

    Raises
    ------
    UnsupportedProblem
        There is no such file, or it does not hold them as finite numbers of equally many tokens.
    """
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UnsupportedProblem([f"{path} must be an .npz file of q, k and v; got one array: use numpy.savez"])
            missing = [name for name in names if name not in archive.files]
            if missing:
                there = ", ".join(archive.files) or "nothing"
                fix = "--names says how q, k and v are called"
                raise UnsupportedProblem([f"{path} must hold {', '.join(missing)}; got {there}: {fix}"])
            arrays = [archive[name] for name in names]
    except UnsupportedProblem:
        raise
    except FileNotFoundError:
        raise UnsupportedProblem([f"{path} must be an .npz file; there is no such file"]) from None
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        rule = f"{path} must be an .npz file of numbers, as numpy.savez writes it"
        raise UnsupportedProblem([f"{rule}; got {_line(error)}"]) from error
    return _usable(arrays)


def _usable(arrays: Sequence[Array]) -> list[Array]:
    reasons, widened = [], []
    for name, array in zip("qkv", arrays):
        if array.dtype == np.dtype("V2"):  # so NumPy's files hold bfloat16
            array = array.view(BFLOAT16)
        if array.dtype in HALVES:
            array = array.astype(np.float32)
        if array.dtype not in (np.float32, np.float64):
            reasons.append(f"{name} must be float16, bfloat16, float32 or float64; got {array.dtype}")
        elif not np.isfinite(array).all():
            reasons.append(f"{name} must be finite; got inf or NaN")
        widened.append(array)
    q, k, _ = widened
    if q.ndim >= 2 and k.ndim >= 2 and q.shape[-2] != k.shape[-2]:
        reasons.append(f"q and k must be of equally many tokens; got {q.shape[-2]} and {k.shape[-2]}")
    elif q.size == 0:
        reasons.append(f"q must hold a query; got shape {q.shape}")
    refuse(reasons)
    return widened


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _recovered(path: Path, identity: str) -> list[Measurement]:
    """The rows of earlier runs of the same study; an unfinished last line is dropped from the file."""
    header = _csv_line(_COLUMNS)
    text = path.read_text("utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1] or header
    try:
        if not (text.startswith(header) or header.startswith(text)):
            raise ValueError("other columns")
        _, *rows = csv.reader(io.StringIO(whole))
        made = [
            (study, Measurement(int(block), name, *map(float, numbers)))
            for study, _causal, _scale, block, name, *numbers in rows
        ]
    except (ValueError, TypeError) as error:
        fix = "name another --csv, or remove the file"
        raise UnsupportedProblem([f"{path} must hold earlier studies; got another file: {fix}"]) from error
    if whole != text:
        path.write_text(whole, "utf-8")
    return [row for study, row in made if study == identity]


def _csv_line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _surveyed(
    survey: Survey, given: argparse.Namespace, path: Path, known: dict[Case, Measurement]
) -> list[Measurement]:
    """Measure what is not known; each row is in the file before the next one is begun."""
    made, number = [], len(given.blocks) * len(given.patterns) * len(given.densities)
    cases = survey.measurements(given.blocks, given.patterns, given.densities, known)
    for count, found in enumerate(cases, 1):
        head = f"{count}/{number} {found.pattern}, blocks of {found.block}, at most {found.at_most:g}"
        if isinstance(found, Measurement):
            if known.get(found.case) != found:  # a pattern of one's own is measured each time
                with path.open("a", encoding="utf-8") as file:
                    file.write(_csv_line([survey.identity, given.causal, given.scale, *found]))
            made.append(found)
            told = f"{found.recall:.1%} of the mass in {found.density:.1%} of the blocks"
        else:
            told = "known" if found in known else "no size fits"
        print(f"{head}: {told}", file=sys.stderr, flush=True)
    return made


def _table(rows: Sequence[Measurement], block: int, given: argparse.Namespace, survey: Survey) -> str:
    """Recall, and the density in brackets, by pattern and limit, and the reason for empty cells."""
    cells = {row.case: f"{row.recall:.2f} ({row.density:.2f})" for row in rows}
    width = max(map(len, given.patterns))
    lines = [f"softmax mass kept (density), blocks of {block}"]
    lines.append(f"{'at most':<{width}}" + "".join(f"{limit:>14g}" for limit in given.densities))
    reasons = []
    for name in given.patterns:
        shown = [cells.get(Case(block, name, limit), "") for limit in given.densities]
        lines.append((f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in shown)).rstrip())
        if not all(shown):
            empty = "an empty row" if not any(shown) else "an empty cell"
            size = "it" if is_own(name) else "its smallest size"
            reasons.append(f"{name} has {empty}: {size} keeps {survey.least_density(block, name):.3g} of the blocks")
    return "\n".join(lines + reasons)


def _plot(rows: Sequence[Measurement], blocks: Sequence[int], path: Path) -> None:
    """Recall over density, a line for each pattern, a panel for each block size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(blocks), 4.5), layout="constrained")
    for axes, block in zip(np.ravel(cast(Any, figure.subplots(1, len(blocks)))), blocks):
        for name in dict.fromkeys(row.pattern for row in rows):
            points = sorted((row.density, row.recall) for row in rows if (row.block, row.pattern) == (block, name))
            axes.plot(*zip(*points), marker="o", label=name, color="black" if name == ORACLE else None)
        axes.axline((0, 0), slope=1, color="grey", linestyle=":", label="even attention")
        axes.set(xlabel="density: blocks kept / blocks visited", ylabel="softmax mass kept", xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"blocks of {block}", fontsize="medium")
        axes.legend(fontsize="small")
    figure.savefig(path)
