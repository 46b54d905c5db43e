"""Planted faults in the study of block patterns, with the guards that must detect them."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from mutations.planting import Edit
from mutations.python_guards import part
from test_recall import EXACT, tolerance

SIGNS = (AssertionError, ArithmeticError, ValueError, SystemExit)  # exceptions with which a guard reports a fault
Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 20, 4))
EVEN = [np.tri(5, dtype=bool), np.ones((5, 5), bool)]


def surveyed(library: ModuleType, name: str, *, causal: bool) -> list[tuple[float, ...]]:
    """Return limits, densities, recalls, and recalls of the lowest head."""
    survey = part(library, "study.survey").Survey(Q, K, V, causal=causal, scale=2.0)
    rows = survey.measurements([4], [name], [0.5, 0.7, 1.0])
    return [(row.at_most, row.density, row.recall, row.lowest_head) for row in rows if hasattr(row, "recall")]


def measurements_are_right(library: ModuleType) -> None:
    """Check windows, and the blocks with the largest masses, against full matrices."""
    for eligible in EVEN:
        causal = not eligible[0, 1]
        row, keys = np.repeat(np.eye(5), 4, axis=0), np.arange(20)
        e = np.exp(2.0 * Q @ K.swapaxes(-1, -2)) * (not causal or keys <= keys[:, None])
        mass = row.T @ (e / e.sum(-1, keepdims=True)) @ row
        sides = [abs(np.subtract.outer(np.arange(5), np.arange(5))) <= side for side in range(5)]
        order = np.argsort(np.argsort(-np.where(eligible, mass, -1), axis=-1), axis=-1)
        for name, forms in (("window", sides), ("oracle", [(order < count) & eligible for count in range(1, 6)])):
            expected = []
            for limit in (0.5, 0.7, 1.0):
                densities = [(form & eligible).mean() / eligible.mean() for form in forms]
                fitting = max((n for n, density in enumerate(densities) if density <= limit), default=-1)
                if fitting >= 0:
                    of_heads = (mass * forms[fitting]).sum((-1, -2)) / 20
                    expected.append((limit, densities[fitting], of_heads.mean(), of_heads.min()))
            # 2 * Q and the factor account for a scale of 2
            relative = tolerance(2 * Q * Q.shape[-1] ** 0.5, K, EXACT, (20, 20))
            np.testing.assert_allclose(surveyed(library, name, causal=causal), expected, rtol=relative)


FAMILIES, SURVEY = "study/families.py", "study/survey.py"
FAULTS = {
    measurements_are_right: {
        "a limit has the next size": Edit(FAMILIES, "densest", "sizes[count - 1]", "sizes[count - 2]"),
        "the oracle takes the blocks of least mass": Edit(
            FAMILIES, "heaviest", "-np.where(eligible, mass", "np.where(eligible, mass"
        ),
        "masses do not know the diagonal": Edit(SURVEY, "Survey._mass", "if self._causal:", "if False:"),
        "masses have a scale of their own": Edit(SURVEY, "Survey._mass", "if self._scale is None", "if True"),
        "the lowest head is the highest": Edit(SURVEY, "Survey._measured", "of_heads.min()", "of_heads.max()"),
    },
}  # fmt: skip
