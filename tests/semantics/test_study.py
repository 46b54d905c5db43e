"""`python -m cuflash study`: what it measures, how it resumes, and how it refuses invalid arguments and files."""

from __future__ import annotations

import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recall import EXACT, tolerance

import cuflash
from cuflash import masks
from cuflash.study import command, survey
from cuflash.study.command import PATTERNS, study_report
from cuflash.study.families import FAMILIES, densest, density_of, smallest_density

ROOT = Path(__file__).parents[2]
Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 4, 50, 8))
K, V = K[:, :2], V[:, :2]
DENSITIES = [0.2, 0.35, 0.6, 1.0]


def grids(causal: bool, grid: int) -> np.ndarray:
    return np.tri(grid, dtype=bool) if causal else np.ones((grid, grid), bool)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8)
@given(st.integers(1, 13), st.integers(1, 3))
def test_each_limit_has_the_densest_size_that_it_allows(name: str, causal: bool, grid: int, num_heads: int) -> None:
    family, eligible = FAMILIES[name], grids(causal, grid)
    every = [density_of(family.blocks(grid, size, num_heads), eligible) for size in family.sizes(grid)]
    chosen = densest(family, DENSITIES, eligible, num_heads)
    assert smallest_density(family, eligible, num_heads) == min(every)
    for limit in DENSITIES:
        fitting = [density for density in every if density <= limit]
        assert (limit in chosen) == bool(fitting)
        assert not fitting or density_of(chosen[limit], eligible) == max(fitting)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [8, 16])
def test_the_oracle_keeps_the_blocks_of_most_mass(causal: bool, block: int) -> None:
    grid, keys = -(-50 // block), np.arange(50)
    s = Q @ np.repeat(K, 2, axis=1).swapaxes(-1, -2) * 8**-0.5
    p = np.exp(np.where(causal & (keys > keys[:, None]), -np.inf, s))
    p /= p.sum(-1, keepdims=True)
    row = np.eye(grid)[keys // block]
    mass = row.T @ p @ row
    eligible = grids(causal, grid)
    best = {count: -np.sort(-mass * eligible, axis=-1)[..., :count].sum(-1) for count in range(1, grid + 1)}
    shares = {count: np.minimum(eligible.sum(-1), count).sum() / eligible.sum() for count in best}
    rows = survey.Survey(Q, K, V, causal=causal, scale=None).measurements([block], ["oracle"], DENSITIES)
    measured = [row for row in rows if isinstance(row, survey.Measurement)]
    assert len(measured) >= 2
    for measurement in measured:
        (count,) = {count for count in best if np.isclose(shares[count], measurement.density)}
        assert np.isclose(
            measurement.recall, best[count].sum(-1).mean() / 50, rtol=tolerance(Q, K, EXACT, (50, 50)), atol=0
        )
        assert count == grid or shares[count + 1] > measurement.at_most


@pytest.mark.parametrize("name", ["window", "random", "oracle"])
def test_a_measurement_is_what_recall_says_of_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[masks.Mask] = []
    attention = survey.attention
    monkeypatch.setattr(
        survey,
        "attention",
        lambda *qkv, mask=None, **options: used.append(mask) or attention(*qkv, mask=mask, **options),
    )
    for causal, scale in ((False, None), (True, 0.5)):
        used.clear()
        rows = [*survey.Survey(Q, K, V, causal=causal, scale=scale).measurements([16], [name], DENSITIES)]
        measured = {row.density: row for row in reversed(rows) if isinstance(row, survey.Measurement)}
        assert used.pop(0) is None  # the first call is dense attention
        assert len(used) == len(measured) > 1  # if a size is the densest one for several limits, it is measured once
        for row, mask in zip(reversed(measured.values()), used, strict=True):
            expected = cuflash.study.recall(Q, K, V, mask=mask, causal=causal, scale=scale)
            of_heads = expected.mass.mean(-1)
            # Sums of n positive numbers in two orders differ by at most n roundoffs each.
            summed = pytest.approx((of_heads.mean(), of_heads.min()), rel=expected.mass.size * EXACT, abs=0)
            assert (row.recall, row.lowest_head) == summed
            assert row.output_error == expected.output_error and 0 < row.density <= row.at_most


# The command.


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("my.npz", q=Q, k=K, v=V)
    return Path("my.npz")


WORDS = "my.npz --patterns sink_local oracle --blocks 16 8 --densities 0.6 0.3 --causal".split()


def rows_of(path: str = "my.study.csv") -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_command_prints_tables_and_writes_rows_and_a_picture(archive: Path) -> None:
    words = [sys.executable, "-m", "cuflash", "study", *WORDS]
    run = subprocess.run(words, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == 0, run.stderr
    rows = rows_of()
    lines = run.stdout.splitlines()
    assert lines[0] == "my.npz: 2 x 4 heads on 2 key/value heads, 50 tokens, 8 dims" == run.stderr.splitlines()[0]
    assert [line for line in lines if line.startswith("softmax")] == [
        f"softmax mass kept (density), blocks of {block}" for block in (16, 8)
    ]
    for row in rows:
        assert f"{float(row['recall']):.2f} ({float(row['density']):.2f})" in run.stdout
    assert run.stderr.count("% of the mass in ") == len(rows) and "\n1/8 sink_local, blocks of 16" in run.stderr
    assert study_report([*WORDS, "--plot", "my.png"]) + "\n" == run.stdout and rows_of() == rows
    assert Path("my.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_study_goes_on_where_it_was(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = study_report([*WORDS, "--csv", "whole.csv"])
    calls: list[int] = []
    compared = survey.compared

    def interrupted(*arguments: object) -> cuflash.study.Recall:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compared(*arguments)

    monkeypatch.setattr(survey, "compared", interrupted)
    with pytest.raises(SystemExit) as left:
        study_report([*WORDS, "--csv", "parts.csv"])
    assert left.value.code == 130 and len(rows_of("parts.csv")) == 2
    with open("parts.csv", "a", encoding="utf-8") as file:
        file.write("an unfinished li")
    assert study_report([*WORDS, "--csv", "parts.csv"]) == whole.replace("whole.csv", "parts.csv")
    assert rows_of("parts.csv") == rows_of("whole.csv") and len(calls) == len(rows_of("whole.csv")) + 1
    calls[:] = [0] * 9
    study_report([*WORDS, "--csv", "parts.csv"])
    assert len(calls) == 9


def test_a_file_keeps_the_rows_of_other_arrays_and_options(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = study_report(WORDS)
    rows, each = rows_of(), len(rows_of())
    changes = {"all keys": (WORDS[:-1], V), "another scale": ([*WORDS, "--scale", "0.5"], V), "arrays": (WORDS, 2 * V)}
    for count, (words, v) in enumerate(changes.values(), 2):
        np.savez("my.npz", q=Q, k=K, v=v)
        study_report(words)
        assert rows_of()[:each] == rows and len({row["study"] for row in rows_of()}) == count
    assert {(row["causal"], row["scale"]) for row in rows_of()} == {("True", ""), ("False", ""), ("True", "0.5")}
    np.savez("my.npz", q=Q, k=K, v=V)
    capsys.readouterr()
    whole = Path("my.study.csv").read_text()
    assert study_report(WORDS) == first and Path("my.study.csv").read_text() == whole
    assert " of the mass in " not in capsys.readouterr().err


def test_a_limit_has_the_densest_size_within_it_and_an_empty_row_has_its_reason(archive: Path) -> None:
    words = "my.npz --patterns window fixed oracle --blocks 8 --densities 0.05 0.39 0.4 --csv x.csv".split()
    _, _, _, _, window, fixed, oracle, *reasons, _, count = study_report(words).splitlines()
    # a density of 0.05 is less than one block per row
    assert window.split()[1:3] == window.split()[3:] and len(oracle.split()) == 5
    assert fixed == "fixed"
    eligible = np.ones((7, 7), bool)
    lines = [
        f"{name} has an empty {what}" for name, what in zip(("window", "fixed", "oracle"), ("cell", "row", "cell"))
    ]
    for reason, start, name in zip(reasons, lines, ("window", "fixed", None), strict=True):
        least = 1 / 7 if name is None else smallest_density(FAMILIES[name], eligible, 4)
        assert reason == f"{start}: its smallest size keeps {least:.3g} of the blocks"
    assert count == f"{len(rows_of('x.csv'))} rows in x.csv"


@pytest.mark.parametrize(
    ("shapes", "read"),
    [
        ([(1, 40, 4, 8)] * 3, "1 x 40 heads, 4 tokens, 8 dims"),
        ([(4, 8)] * 3, "one head, 4 tokens, 8 dims"),
        ([(6, 4, 8), (2, 4, 8), (2, 4, 16)], "6 heads on 2 key/value heads, 4 tokens, 8 dims (16 for values)"),
    ],
)
def test_arrays_that_nothing_fits_are_said_as_they_were_read(
    archive: Path, shapes: list[tuple[int, ...]], read: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("my.npz", **{name: np.ones(shape) for name, shape in zip("qkv", shapes)})
    with pytest.raises(SystemExit) as left:
        study_report(["my.npz"])
    out, err = capsys.readouterr()
    reason = f"my.npz was read as {read}, and every pattern exceeds every density limit ("
    message = f"python -m cuflash study: error: {reason}"
    assert left.value.code == 1 and out == "" and err.splitlines()[-1].startswith(message)
    assert ("q.swapaxes(-3, -2)" in err) == (len(shapes[0]) > 2)


@pytest.mark.parametrize(("size", "scale"), [(1e30, None), (1e30, 1e-59), (1e18, None), (1e-30, 1e57)])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_any_size_have_finite_rows(size: float, scale: float | None, causal: bool) -> None:
    q, k, v = (x.astype(np.float32) for x in (size * Q, size * K, V))
    with np.errstate(all="raise", under="ignore"):
        rows = survey.Survey(q, k, v, causal=causal, scale=scale).measurements([16], ["window", "oracle"], [0.5, 1.0])
        measured = [row for row in rows if isinstance(row, survey.Measurement)]
    assert len(measured) == 4 and all(np.isfinite(row[3:]).all() for row in measured)
    if scale is not None:  # float64 represents these scores without difficulty
        exact = survey.Survey(*(x.astype(float) for x in (q, k, v)), causal=causal, scale=scale)
        for row, other in zip(measured, exact.measurements([16], ["window", "oracle"], [0.5, 1.0]), strict=True):
            assert isinstance(other, survey.Measurement) and row.density == other.density
            assert row.recall == pytest.approx(other.recall, rel=tolerance(Q, K, np.finfo(np.float32).eps, (50, 50)))


def test_scores_that_overflow_float64_are_refused(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("my.npz", q=1e200 * Q, k=1e200 * K, v=V)
    refused(WORDS, "q and k must have finite scores; got scores that overflow: divide q or k", capsys)


OWN = """
import numpy as np
from cuflash import BlockIndex, masks, selectors
window = masks.SlidingWindow(16, 16)
index = BlockIndex.from_mask(window, 50, 50, 16)
number = 3
def pooled(q, k, *, block, density, causal):
    budget = selectors.Budget(top_k=max(1, int(density * -(-q.shape[-2] // block))))
    return selectors.pooled(q, k, block=block, budget=budget, causal=causal)
"""


def test_patterns_of_ones_own_are_measured(archive: Path) -> None:
    Path("own_patterns_of_a_test.py").write_text(OWN, "utf-8")
    blocks = np.eye(4, dtype=bool) | np.eye(4, k=1, dtype=bool)
    np.savez("one.npz", blocks)
    np.savez("two.npz", kept=blocks, other=~blocks)
    names = [f"own_patterns_of_a_test:{name}" for name in ("window", "index", "pooled")]
    words = ["my.npz", "--patterns", *names, "one.npz", "two.npz:kept", "--blocks", "16", "--densities", "0.5", "0.9"]
    report = study_report(words)
    rows = {(row["pattern"], row["at_most"]): row for row in rows_of()}
    module = sys.modules["own_patterns_of_a_test"]
    expected = {names[0]: module.window, names[1]: module.index, "one.npz": masks.BlockPattern(blocks, 16)}
    for name, mask in {**expected, "two.npz:kept": expected["one.npz"]}.items():
        row = rows[name, "0.9"]
        kept_mass = cuflash.study.recall(Q, K, V, mask=mask).mass.mean()
        assert float(row["recall"]) == pytest.approx(kept_mass, rel=100 * EXACT)
        states = cuflash.BlockIndex.from_mask(mask, 50, 50, 16).states() > 0
        assert float(row["density"]) == states.mean() and (name, "0.5") not in rows or states.mean() <= 0.5
    assert [float(rows[names[2], limit]["density"]) for limit in ("0.5", "0.9")] == [0.5, 0.75]
    assert f"{names[0]} has an empty cell: it keeps 0.625 of the blocks" in report
    whole = Path("my.study.csv").read_text("utf-8")
    assert study_report(words) == report and Path("my.study.csv").read_text("utf-8") == whole


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere:f", "nowhere:f must be MODULE:NAME of a module in this folder or of an installed module; No module"),
        ("cuflash:nothing", "cuflash:nothing must be MODULE:NAME of a module in this folder or of an installed module"),
        ("cuflash:__version__", "must be a mask, or a function of (q, k, *, block, density, causal); got '"),
        ("none.npz", "none.npz must be an .npz file; the file does not exist"),
        ("my.npz", "my.npz must hold one array; got q, k, v: use my.npz:ARRAY to name one"),
        ("my.npz:w", "my.npz must hold one array; got q, k, v: use my.npz:ARRAY to name one"),
        ("my.npz:q", "my.npz must hold booleans [..., grid, grid], one for each block; got an array of shape (2, 4,"),
    ],
)
def test_patterns_that_are_not_there_get_one_line(
    archive: Path, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["my.npz", "--patterns", word], message, capsys)


def test_blocks_of_another_grid_get_one_line(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("one.npz", np.eye(3, dtype=bool))
    with pytest.raises(SystemExit) as left:
        study_report(["my.npz", "--patterns", "one.npz", "--blocks", "16"])
    assert left.value.code == 2
    assert "one.npz: blocks must have shape (..., 4, 4) for lengths (50, 50)" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_dtypes_and_one_matrix_are_taken(archive: Path, dtype: type) -> None:
    q, k, v = (array[0, 0].astype(dtype) for array in (Q, K, V))
    np.savez("my.npz", q=q, k=k, v=v)
    study_report([*WORDS, "--csv", "narrow.csv"])
    np.savez("my.npz", queries=q.astype(np.float32), k=k.astype(np.float32), v=v.astype(np.float32))
    study_report([*WORDS, "--csv", "wide.csv", "--names", "queries", "k", "v"])
    assert rows_of("narrow.csv") == rows_of("wide.csv")


def refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        study_report(words)
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == "" and err.count("\n") == 1, err
    assert err.startswith("python -m cuflash study: error: ") and sentence in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("none.npz", "none.npz must be an .npz file; the file does not exist"),
        ("", "the following arguments are required: archive"),
        ("text.npz", "text.npz must be an .npz file of numbers, written by numpy.savez; got"),
        ("half.npz", "half.npz must be an .npz file of numbers, written by numpy.savez; got File is not a zip file"),
        ("torn.npz", "torn.npz must be an .npz file of numbers, written by numpy.savez; got Bad CRC-32"),
        (".", "Is a directory"),
        ("one.npy", "one.npy must be an .npz file of q, k and v; got one array: use numpy.savez"),
        ("few.npz", "few.npz must hold k, v; got q, other: pass the names of q, k and v as --names"),
        ("objects.npz", "objects.npz must be an .npz file of numbers, written by numpy.savez; got Object arrays"),
        ("whole.npz", "q must be float16, bfloat16, float32 or float64; got int64"),
        ("nan.npz", "v must be finite; got inf or NaN"),
        ("lengths.npz", "q and k must have the same number of tokens; got 50 and 40"),
        ("heads.npz", "q's 4 heads must be a multiple of k's 3"),
        ("empty.npz", "q must hold at least one query; got shape"),
        (
            "my.npz --patterns windows",
            f"--patterns must be names among {', '.join(PATTERNS)}, separated by spaces, MODULE:NAME or FILE.npz; "
            "got windows",
        ),
        ("my.npz --blocks 0 16", "--blocks must be positive; got 0"),
        ("my.npz --blocks x", "argument --blocks: takes ints separated by spaces; got 'x'"),
        ("my.npz --densities 0.5 1.5", "--densities must be in (0, 1]; got 1.5"),
        ("my.npz --densities nan", "--densities must be in (0, 1]; got nan"),
        ("my.npz --csv there/is/none.csv", "--csv must be in a folder that exists; got there/is/none.csv"),
        ("my.npz --csv text.csv", "text.csv must hold earlier studies; got a different file: name a different --csv"),
        ("my.npz --csv my.png", "--csv must end with .csv; got my.png"),
        ("my.npz --csv .", "--csv must end with .csv; got ."),
        ("my.npz --plot my.txt", "--plot must end with .png, .pdf, .svg; got my.txt"),
        ("my.npz --scale nan", "scale must be a finite number or None; got nan"),
        ("my.npz --blocks 0 --densities 2", "--blocks must be positive; got 0; --densities must be in (0, 1]; got 2"),
    ],
)
def test_wrong_arguments_and_files_get_one_line(
    archive: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.npz").write_text("q, k, v")
    Path("text.csv").write_text("q, k, v")
    Path("half.npz").write_bytes(archive.read_bytes()[:900])
    torn = bytearray(archive.read_bytes())
    torn[1000] ^= 1
    Path("torn.npz").write_bytes(torn)
    np.save("one.npy", Q)
    np.savez("few.npz", q=Q, other=K)
    np.savez("objects.npz", q=np.array([None, 1]), k=K, v=V)
    np.savez("whole.npz", q=Q.astype(int), k=K, v=V)
    np.savez("nan.npz", q=Q, k=K, v=np.where(V > 2, np.nan, V))
    np.savez("lengths.npz", q=Q, k=K[..., :40, :], v=V)
    np.savez("heads.npz", q=Q, k=Q[:, :3], v=Q[:, :3])
    np.savez("empty.npz", q=Q[..., :0, :], k=K[..., :0, :], v=V[..., :0, :])
    refused(words.split(), sentence, capsys)


def test_a_picture_without_matplotlib_is_refused_before_any_work(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    refused([*WORDS, "--plot", "my.png"], "--plot needs matplotlib: pip install matplotlib, or leave it out", capsys)


COMMANDS = {  # command-line arguments -> rest of the last line of standard error
    "an unknown command": (
        "studies", ": error: the command must be doctor, memory, roofline, study or none; got studies"
    ),
    "an argument of doctor": ("doctor all", " doctor: error: the command takes no arguments; got all"),
    "an unknown option": ("--versions", ": error: options are --help and --version; got --versions"),
    "an argument of an option": ("--version 2", ": error: --version takes no arguments; got 2"),
    "an option of memory": ("memory --nothing", " memory: error: "),
    "an option of roofline": ("roofline --nothing", " roofline: error: "),
    "an option of study": ("study --nothing", " study: error: "),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_word_gets_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = COMMANDS[name]
    assert _run(words, monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith(f"python -m cuflash{message}")
    assert " --nothing" in words or err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_told(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(flag, monkeypatch) == 0
    assert capsys.readouterr() == (f"cuflash {cuflash.__version__}\n", "")


def test_help_names_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--help", monkeypatch) == 0
    output = capsys.readouterr().out
    assert re.findall(r"python -m cuflash (\w+)  ", output) == ["doctor", "memory", "roofline", "study"]


def _run(words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `python -m cuflash` with these arguments in this process, and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["cuflash", *words.split()])
    try:
        runpy.run_module("cuflash", run_name="__main__")
    except SystemExit as left:
        return int(left.code or 0)
    return 0
