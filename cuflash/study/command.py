"""``python -m cuflash study``: the softmax mass of the user's q, k and v that block patterns keep."""

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
        """Print one line, without the usage, and exit."""
        self.exit(2, f"{self.prog}: error: {message}\n")


@explains_keywords
def study_report(arguments: Sequence[str]) -> str:
    """Run ``python -m cuflash study``; write each measurement to a CSV file immediately, and progress to stderr.

    Parameters
    ----------
    arguments : sequence of str
        The words after ``study``.

    Returns
    -------
    str
        How the axes of the arrays were read, a table for each block size, and the reasons for empty rows.

    Raises
    ------
    SystemExit
        Status 2 and a line with all reasons if an argument, the archive or the CSV file is invalid. Status 1 if every
        pattern exceeds every density limit, and 130 after an interruption.

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
    flags = parser.parse_args(arguments)
    path = Path(flags.csv or f"{Path(flags.archive).stem}.study.csv")
    try:
        own = _check(flags)
        arrays = load_heads(Path(flags.archive), flags.names)
        survey = Survey(*arrays, causal=flags.causal, scale=flags.scale, own=own)
        earlier_rows = _recovered(path, survey.identity)
    except (UnsupportedProblem, TypeError, OSError) as error:
        parser.error("; ".join(getattr(error, "reasons", (str(error),))))
    read = f"{flags.archive}: {read_as(arrays)}"
    print(read, file=sys.stderr, flush=True)
    known = {row.case: row for row in earlier_rows}
    try:
        known |= {row.case: row for row in _surveyed(survey, flags, path, known)}
    except UnsupportedProblem as error:  # one of the user's own patterns is invalid
        parser.error("; ".join(error.reasons))
    except KeyboardInterrupt:
        parser.exit(130, f"\n{_PROGRAM}: interrupted; run the same command again to continue from the rows of {path}\n")
    rows = [known[Case(*case)] for case in _cases(flags) if Case(*case) in known]
    if not rows:
        message = f"{flags.archive} was read as {read_as(arrays)}, and every pattern exceeds every density limit"
        swap = "save q.swapaxes(-3, -2), and k and v too, if tokens come before heads; " * (arrays[0].ndim > 2)
        parser.exit(1, f"{_PROGRAM}: error: {message} ({swap}lower --blocks or raise --densities)\n")
    if flags.plot is not None:
        _plot(rows, flags.blocks, flags.plot)
    tables = (_table(rows, block, flags, survey) for block in flags.blocks)
    return "\n\n".join([read, *tables, f"{len(rows)} rows in {path}"])


def read_as(arrays: Sequence[Array]) -> str:
    """Return how the axes of q, k and v are read, such as "1 x 12 heads, 512 tokens, 64 dims"."""
    q, k, v = arrays
    *leading, tokens, dim = q.shape
    heads = f"{' x '.join(map(str, leading))} heads" if leading else "one head"
    if leading and k.shape[-3] != leading[-1]:
        heads += f" on {k.shape[-3]} key/value heads"
    values = f" ({v.shape[-1]} for values)" if v.shape[-1] != dim else ""
    return f"{heads}, {tokens} tokens, {dim} dims{values}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        _PROGRAM,
        description="how much softmax mass of your attention each block pattern keeps, and at which density",
        epilog=f"example: {_PROGRAM} my.npz --patterns window oracle --blocks 32 64 --densities 0.25 0.5 --plot my.png",
    )
    parser.add_argument("archive", help="an .npz file with q, k and v, [..., heads, tokens, dim] or [tokens, dim]")
    parser.add_argument(
        "--names", nargs=3, default=["q", "k", "v"], metavar=("Q", "K", "V"),
        help="names of the arrays in the archive; default: q k v",
    )
    parser.add_argument(
        "--patterns", nargs="+", default=[*PATTERNS],
        help=f"names among {', '.join(PATTERNS)}; default: all. Also MODULE:NAME of a mask or of a function (q, k, *, "
        "block, density, causal) that returns a mask, and FILE.npz of booleans, one for each block",
    )
    parser.add_argument(
        "--blocks", nargs="+", type=_one(int), default=[64], help="sides of square blocks in tokens; default: 64"
    )
    parser.add_argument(
        "--densities", nargs="+", type=_one(float), default=[0.125, 0.25, 0.5],
        help="maximum block densities; each pattern is measured in its densest size within a limit; "
        "default: 0.125 0.25 0.5",
    )
    parser.add_argument("--causal", action="store_true", help="queries do not attend later keys")
    parser.add_argument("--scale", type=float, help="factor of the scores; default: 1 / sqrt(dim)")
    parser.add_argument(
        "--csv", help="file of all rows; rows in it are not measured again; default: NAME.study.csv in this folder"
    )
    parser.add_argument("--plot", type=Path, help="file for a plot of recall over density, which needs matplotlib")
    return parser


def _one(kind: type[float]) -> Callable[[str], float]:
    """Return a function that converts one item of a list in an argument to a number."""

    def parse(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {kind.__name__}s separated by spaces; got {text!r}") from None

    return parse


def _check(flags: argparse.Namespace) -> dict[str, OwnPattern]:
    """Refuse invalid flags, remove duplicates from their lists, and return the user's own patterns."""
    flags.patterns, flags.blocks = list(dict.fromkeys(flags.patterns)), list(dict.fromkeys(flags.blocks))
    flags.densities = sorted(set(flags.densities))
    reasons = [
        f"--patterns must be names among {', '.join(PATTERNS)}, separated by spaces, MODULE:NAME or FILE.npz; "
        f"got {name}"
        for name in flags.patterns
        if name not in PATTERNS and not is_own(name)
    ]
    own = {}
    for name in filter(is_own, flags.patterns):
        with collecting(reasons):
            own[name] = loaded(name)
    reasons += [f"--blocks must be positive; got {block}" for block in flags.blocks if block < 1]
    reasons += [f"--densities must be in (0, 1]; got {limit:g}" for limit in flags.densities if not 0 < limit <= 1]
    if flags.plot is not None and find_spec("matplotlib") is None:
        reasons.append("--plot needs matplotlib: pip install matplotlib, or leave it out")
    if flags.plot is not None and flags.plot.suffix not in _PICTURES:
        reasons.append(f"--plot must end with {', '.join(_PICTURES)}; got {flags.plot}")
    if flags.csv is not None and Path(flags.csv).suffix.lower() != ".csv":
        reasons.append(f"--csv must end with .csv; got {flags.csv}")
    for option, file in (("--csv", flags.csv), ("--plot", flags.plot)):
        if file is not None and not Path(file).parent.is_dir():
            reasons.append(f"{option} must be in a folder that exists; got {file}")
    refuse(reasons)
    return own


def _cases(flags: argparse.Namespace) -> Iterable[tuple[int, str, float]]:
    return ((block, name, limit) for block in flags.blocks for name in flags.patterns for limit in flags.densities)


def load_heads(path: Path, names: Sequence[str] = ("q", "k", "v")) -> list[Array]:
    """Return q, k and v of an archive, with float16 and bfloat16 converted to float32.

    Parameters
    ----------
    path : Path
        The .npz file.
    names : sequence of str
        The names of q, k and v in the file.

    Raises
    ------
    UnsupportedProblem
        The file does not exist, or its arrays are not finite numbers, or have different numbers of tokens.
    """
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UnsupportedProblem(f"{path} must be an .npz file of q, k and v; got one array: use numpy.savez")
            missing = [name for name in names if name not in archive.files]
            if missing:
                contents = ", ".join(archive.files) or "nothing"
                fix = "pass the names of q, k and v as --names"
                raise UnsupportedProblem(f"{path} must hold {', '.join(missing)}; got {contents}: {fix}")
            arrays = [archive[name] for name in names]
    except UnsupportedProblem:
        raise
    except FileNotFoundError:
        raise UnsupportedProblem(f"{path} must be an .npz file; the file does not exist") from None
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        rule = f"{path} must be an .npz file of numbers, written by numpy.savez"
        raise UnsupportedProblem(f"{rule}; got {_line(error)}") from error
    return _usable(arrays)


def _usable(arrays: Sequence[Array]) -> list[Array]:
    reasons, widened = [], []
    for name, array in zip("qkv", arrays):
        if array.dtype == np.dtype("V2"):  # the dtype of bfloat16 in NumPy's files
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
        reasons.append(f"q and k must have the same number of tokens; got {q.shape[-2]} and {k.shape[-2]}")
    elif q.size == 0:
        reasons.append(f"q must hold at least one query; got shape {q.shape}")
    refuse(reasons)
    return widened


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _recovered(path: Path, identity: str) -> list[Measurement]:
    """Return the rows of earlier runs of the same study, and remove an incomplete last line from the file."""
    header = _csv_line(_COLUMNS)
    text = path.read_text("utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1] or header
    try:
        if not (text.startswith(header) or header.startswith(text)):
            raise ValueError("other columns")
        _, *rows = csv.reader(io.StringIO(whole))
        measurements = [
            (study, Measurement(int(block), name, *map(float, numbers)))
            for study, _causal, _scale, block, name, *numbers in rows
        ]
    except (ValueError, TypeError) as error:
        fix = "name a different --csv, or remove the file"
        raise UnsupportedProblem(f"{path} must hold earlier studies; got a different file: {fix}") from error
    if whole != text:
        path.write_text(whole, "utf-8")
    return [row for study, row in measurements if study == identity]


def _csv_line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _surveyed(
    survey: Survey, flags: argparse.Namespace, path: Path, known: dict[Case, Measurement]
) -> list[Measurement]:
    """Measure the cases that are not known; each row is written to the file before the next measurement."""
    measurements, number = [], len(flags.blocks) * len(flags.patterns) * len(flags.densities)
    cases = survey.measurements(flags.blocks, flags.patterns, flags.densities, known)
    for count, result in enumerate(cases, 1):
        head = f"{count}/{number} {result.pattern}, blocks of {result.block}, at most {result.at_most:g}"
        if isinstance(result, Measurement):
            if known.get(result.case) != result:  # the user's own patterns are measured in each run
                with path.open("a", encoding="utf-8") as file:
                    file.write(_csv_line([survey.identity, flags.causal, flags.scale, *result]))
            measurements.append(result)
            message = f"{result.recall:.1%} of the mass in {result.density:.1%} of the blocks"
        else:
            message = "known" if result in known else "no size fits"
        print(f"{head}: {message}", file=sys.stderr, flush=True)
    return measurements


def _table(rows: Sequence[Measurement], block: int, flags: argparse.Namespace, survey: Survey) -> str:
    """Return a table of recall (and density) by pattern and density limit, and the reasons for empty cells."""
    cells = {row.case: f"{row.recall:.2f} ({row.density:.2f})" for row in rows}
    width = max(map(len, flags.patterns))
    lines = [f"softmax mass kept (density), blocks of {block}"]
    lines.append(f"{'at most':<{width}}" + "".join(f"{limit:>14g}" for limit in flags.densities))
    reasons = []
    for name in flags.patterns:
        shown = [cells.get(Case(block, name, limit), "") for limit in flags.densities]
        lines.append((f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in shown)).rstrip())
        if not all(shown):
            empty = "an empty row" if not any(shown) else "an empty cell"
            size = "it" if is_own(name) else "its smallest size"
            reasons.append(f"{name} has {empty}: {size} keeps {survey.least_density(block, name):.3g} of the blocks")
    return "\n".join(lines + reasons)


def _plot(rows: Sequence[Measurement], blocks: Sequence[int], path: Path) -> None:
    """Draw recall over density, with a line for each pattern and a panel for each block size."""
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
