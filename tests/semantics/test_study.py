"""`python -m cuflash study`: what it measures, how it continues, and how it refuses wrong arguments and files."""

from __future__ import annotations

import csv
import re
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
from cuflash.study.families import FAMILIES, densest, density_of

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
    every = [density_of(family.make(grid, size, num_heads), eligible) for size in family.sizes(grid)]
    chosen = densest(family, DENSITIES, eligible, num_heads)
    for below, limit in zip([0.0, *DENSITIES], DENSITIES):
        fitting = [density for density in every if below < density <= limit]
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
    for found in measured:
        (count,) = {count for count in best if np.isclose(shares[count], found.density)}
        assert np.isclose(found.recall, best[count].sum(-1).mean() / 50, rtol=tolerance(Q, K, EXACT, (50, 50)), atol=0)
        assert count == grid or shares[count + 1] > found.at_most


@pytest.mark.parametrize("name", ["window", "random", "oracle"])
def test_a_measurement_is_what_recall_says_of_the_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[masks.Mask] = []
    kept = survey.kept
    monkeypatch.setattr(survey, "kept", lambda *given: used.append(given[4]) or kept(*given))
    for causal, scale in ((False, None), (True, 0.5)):
        used.clear()
        rows = [*survey.Survey(Q, K, V, causal=causal, scale=scale).measurements([16], [name], DENSITIES)]
        for row, mask in zip([row for row in rows if isinstance(row, survey.Measurement)], used, strict=True):
            expected = cuflash.recall(Q, K, V, mask, causal=causal, scale=scale)
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
    assert [line for line in lines if line.startswith("softmax")] == [
        f"softmax mass kept (density), blocks of {block}" for block in (16, 8)
    ]
    for row in rows:
        assert f"{float(row['recall']):.2f} ({float(row['density']):.2f})" in run.stdout
    assert run.stderr.count("% of the mass in ") == len(rows) and run.stderr.startswith("1/8 sink_local, blocks of 16")
    assert study_report([*WORDS, "--plot", "my.png"]) + "\n" == run.stdout and rows_of() == rows
    assert Path("my.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_study_goes_on_where_it_was(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = study_report([*WORDS, "--csv", "whole.csv"])
    calls: list[int] = []
    kept = survey.kept

    def interrupted(*given: object) -> cuflash.Recall:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return kept(*given)

    monkeypatch.setattr(survey, "kept", interrupted)
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


def test_rows_of_other_arrays_or_options_are_not_taken(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study_report(WORDS)
    for words in (WORDS[:-1], [*WORDS, "--scale", "0.5"]):
        refused(words, "my.study.csv must be of the same arrays and options; got others: name another --csv", capsys)
    np.savez("my.npz", q=Q, k=K, v=2 * V)
    refused(WORDS, "my.study.csv must be of the same arrays", capsys)


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
        ("none.npz", "none.npz must be an .npz file; there is no such file"),
        ("", "the following arguments are required: archive"),
        ("text.npz", "text.npz must be an .npz file of numbers, as numpy.savez writes it; got"),
        ("half.npz", "half.npz must be an .npz file of numbers, as numpy.savez writes it; got File is not a zip file"),
        ("torn.npz", "torn.npz must be an .npz file of numbers, as numpy.savez writes it; got Bad CRC-32"),
        (".", "Is a directory"),
        ("one.npy", "one.npy must be an .npz file of q, k and v; got one array: use numpy.savez"),
        ("few.npz", "few.npz must hold k, v; got q, other: --names says how q, k and v are called"),
        ("objects.npz", "objects.npz must be an .npz file of numbers, as numpy.savez writes it; got Object arrays"),
        ("whole.npz", "q must be float16, bfloat16, float32 or float64; got int64"),
        ("nan.npz", "v must be finite; got inf or NaN"),
        ("lengths.npz", "q and k must be of equally many tokens; got 50 and 40"),
        ("heads.npz", "q's 4 heads must be a multiple of k's 3"),
        ("empty.npz", "q must hold a query; got shape"),
        ("my.npz --patterns windows", f"--patterns must be of {', '.join(PATTERNS)}, with spaces between; got windows"),
        ("my.npz --blocks 0 16", "--blocks must be positive; got 0"),
        ("my.npz --blocks x", "argument --blocks: takes ints with spaces between; got 'x'"),
        ("my.npz --densities 0.5 1.5", "--densities must lie in (0, 1]; got 1.5"),
        ("my.npz --densities nan", "--densities must lie in (0, 1]; got nan"),
        ("my.npz --csv there/is/none.csv", "--csv must be in a folder that exists; got there/is/none.csv"),
        ("my.npz --csv text.npz", "text.npz must hold an earlier study; got another file: name another --csv"),
        ("my.npz --csv .", "Is a directory"),
        ("my.npz --plot my.txt", "--plot must end with .png, .pdf, .svg; got my.txt"),
        ("my.npz --scale nan", "scale must be a finite number or None; got nan"),
        ("my.npz --blocks 0 --densities 2", "--blocks must be positive; got 0; --densities must lie in (0, 1]; got 2"),
    ],
)
def test_wrong_arguments_and_files_get_one_line(
    archive: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.npz").write_text("q, k, v")
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("studies", ": error: the command must be doctor, memory, roofline, study or none; got studies\n"),
        ("doctor all", " doctor: error: the command takes no arguments; got all\n"),
    ],
)
def test_an_unknown_command_gets_one_line(words: str, told: str) -> None:
    command = [sys.executable, "-m", "cuflash", *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"python -m cuflash{told}")


def test_help_names_the_commands() -> None:
    command = [sys.executable, "-m", "cuflash", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert re.findall(r"python -m cuflash (\w+)  ", told) == ["doctor", "memory", "roofline", "study"]
