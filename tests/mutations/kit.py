"""Faults in the testing kit: checks that pass without having compared, and strategies that find less."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
from mutations.planting import Edit
from mutations.python_guards import part

SIGNS = (AssertionError, ValueError)  # exceptions by which guards see a fault


def refused(kind: type[Exception], words: str, check: Any, *arguments: Any, **options: Any) -> None:
    """Assert that a check raises an error of a kind whose text begins with words."""
    try:
        check(*arguments, **options)
    except (AssertionError, TypeError) as error:
        assert isinstance(error, kind) and re.match(words, str(error)), error
    else:
        raise AssertionError(f"{check.__name__} passed")


def results_are_compared(library: ModuleType) -> None:
    """Check that no result, None, a wrong shape, a narrower dtype, and gradients without do are refused."""
    kit, structure = part(library, "testing.assertions"), part(library, "testing.strategies").Structure
    check, non_finite = kit.assert_within_bounds, part(library, "testing.non_finite").assert_non_finite
    example = structure(num_heads=2, seqlen_q=3, seqlen_kv=5, dtype="float64").example()
    o = np.asarray(example.exact.o, np.float64)
    assert check(example, o=o) <= 1 and non_finite(example, o=o) <= 1
    for each in (check, non_finite):
        refused(TypeError, "give at least one", each, example)
        refused(TypeError, "o must be an array; got None", each, example, o=None)
        refused(AssertionError, "o has shape", each, example, o=o[:1])
        refused(AssertionError, "o has dtype complex128", each, example, o=o.astype(complex))
        refused(AssertionError, "o has dtype float16", each, example, o=np.zeros(o.shape, np.float16))
        refused(TypeError, "dq needs an example with do", each, example.but(do=None, dlse=None), dq=o)
    refused(TypeError, "give at least one", check, example, others={})
    refused(TypeError, "x must be an array of real", kit.assert_within, "x", 1j * o, o, np.inf)
    refused(AssertionError, r"x\[0\] .* off by 1, 1.004 times", kit.assert_within, "x", [1.004], [0.0], [1.0])


ASSERTIONS = "testing/assertions.py"
FAULTS = {
    results_are_compared: {
        "no result passes": Edit(ASSERTIONS, "require_results", "if not results and not others:", "if False:"),
        "a None is not compared": Edit(
            ASSERTIONS, "assert_within_bounds", "if result is not ...", "if result not in (..., None)"
        ),
        "a part of a result passes": Edit(
            "testing/non_finite.py", "assert_not_finite_where_due",
            "as_result(name, result, must.is_nan.shape, example)", "result",
        ),
        "an imaginary part is dropped": Edit(
            ASSERTIONS, "assert_within", 'if not (_is_float(each.dtype) or each.dtype.kind in "iu"):', "if False:"
        ),
        "a narrow dtype passes": Edit(
            ASSERTIONS, "as_result", "limits(array.dtype).eps <= limits(least).eps", "True"
        ),
    },
}  # fmt: skip
