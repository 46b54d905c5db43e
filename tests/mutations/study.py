"""Faults in the study of block patterns, with the guards that must see them."""

from __future__ import annotations

import io
from contextlib import chdir, redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
from mutations.planting import Edit
from mutations.python_guards import part
from test_recall import EXACT, tolerance

SIGNS = (AssertionError, ValueError, SystemExit)  # exceptions by which guards see a fault
Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 20, 4))
EVEN = [np.tri(5, dtype=bool), np.ones((5, 5), bool)]


def surveyed(library: ModuleType, name: str, *, causal: bool) -> list[tuple[float, ...]]:
    """Return densities, recalls, and recalls of the lowest head."""
    survey = part(library, "study.survey").Survey(Q, K, V, causal=causal, scale=2.0)
    rows = survey.measurements([4], [name], [0.5, 0.7, 1.0])
    return [(row.at_most, row.density, row.recall, row.lowest_head) for row in rows if hasattr(row, "recall")]


def measurements_are_right(library: ModuleType) -> None:
    """Windows, and the blocks of largest mass, agree with whole matrices."""
    for eligible in EVEN:
        causal = not eligible[0, 1]
        row, keys = np.repeat(np.eye(5), 4, axis=0), np.arange(20)
        e = np.exp(2.0 * Q @ K.swapaxes(-1, -2)) * (not causal or keys <= keys[:, None])
        mass = row.T @ (e / e.sum(-1, keepdims=True)) @ row
        sides = [abs(np.subtract.outer(np.arange(5), np.arange(5))) <= side for side in range(5)]
        order = np.argsort(np.argsort(-np.where(eligible, mass, -1), axis=-1), axis=-1)
        for name, forms in (("window", sides), ("oracle", [(order < count) & eligible for count in range(1, 6)])):
            expected, before = [], -1
            for limit in (0.5, 0.7, 1.0):
                densities = [(form & eligible).mean() / eligible.mean() for form in forms]
                fitting = max((n for n, density in enumerate(densities) if density <= limit), default=-1)
                if fitting > before:
                    of_heads = (mass * forms[fitting]).sum((-1, -2)) / 20
                    expected.append((limit, densities[fitting], of_heads.mean(), of_heads.min()))
                before = fitting
            relative = tolerance(2 * Q * Q.shape[-1] ** 0.5, K, EXACT, (20, 20))  # the scale is 2
            np.testing.assert_allclose(surveyed(library, name, causal=causal), expected, rtol=relative)


def studies_go_on(library: ModuleType) -> None:
    """A study whose file ends within a line continues behind the last whole line, and not with other arrays."""
    report = part(library, "study.command").study_report
    words = "my.npz --patterns window --blocks 4 --densities 0.7 0.5 1 --csv rows.csv".split()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stderr(io.StringIO()) as told:
        np.savez("my.npz", q=Q, k=K, v=V)
        printed, file = report(words), Path("rows.csv")
        whole = file.read_text()
        file.write_text("".join(whole.splitlines(keepends=True)[:2]) + "torn")
        told.truncate(0)
        assert report(words) == printed and file.read_text() == whole and told.getvalue().count("known") == 1
        for change in ({"v": 2 * V}, {"q": Q[:, ::-1]}):
            np.savez("my.npz", **{"q": Q, "k": K, "v": V} | change)
            try:
                report(words)
            except SystemExit as left:
                assert left.code == 2 and file.read_text() == whole
            else:
                raise AssertionError("other arrays are taken")
        file.write_text("notes of my own")
        try:
            report(words)
        except SystemExit:
            assert file.read_text() == "notes of my own"
        else:
            raise AssertionError("a file of other contents is taken")


FAMILIES, SURVEY, COMMAND = "study/families.py", "study/survey.py", "study/command.py"
FAULTS = {
    measurements_are_right: {
        "blocks that nothing visits count": Edit(
            FAMILIES, "density_of", "(blocks & eligible).mean() / eligible.mean()", "blocks.mean()"
        ),
        "a limit has the next size": Edit(FAMILIES, "densest", "sizes[fitting - 1]", "sizes[fitting - 2]"),
        "the oracle takes the blocks of least mass": Edit(
            FAMILIES, "heaviest", "-np.where(eligible, mass", "np.where(eligible, mass"
        ),
        "masses do not know the diagonal": Edit(SURVEY, "Survey._mass", "if self._causal:", "if False:"),
        "masses have a scale of their own": Edit(SURVEY, "Survey._mass", "if self._scale is None", "if True"),
        "the lowest head is the highest": Edit(SURVEY, "Survey._measured", "of_heads.min()", "of_heads.max()"),
    },
    studies_go_on: {
        "a torn line stays": Edit(COMMAND, "_recovered", "if whole != text:", "if False:"),
        "studies have one identity": Edit(SURVEY, "Survey.identity", "digest.update(array.tobytes())", "pass"),
        "every file is a study": Edit(
            COMMAND, "_recovered", "if not (text.startswith(header) or header.startswith(text)):", "if False:"
        ),
        "what is known is measured again": Edit(SURVEY, "Survey.measurements", "and case not in known", ""),
    },
}  # fmt: skip
