"""Faults in the testing kit: checks that pass without having compared, and strategies that find less."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import Phase, given, seed, settings
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
    """No result, None, another shape and a dtype that holds less are refused, and so are gradients without do."""
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


def functions_return_what_they_must(library: ModuleType) -> None:
    """A function that returns o alone, nothing or too much is told so by every property, also where it says nothing."""
    kit, structure = part(library, "testing.properties"), part(library, "testing.strategies").Structure
    attention = part(library, "reference").attention
    probes = part(library, "testing.assertions").assert_exact_probes
    plain = {"num_heads": 2, "num_kv_heads": 2, "seqlen_q": 3, "dtype": "float64"}
    changes = (lambda o, lse: o, lambda o, lse: (o, lse, lse), lambda o, lse: None, lambda o, lse: (o, None))
    for example in (structure(**plain, seqlen_kv=5).example(), structure(**plain, seqlen_kv=0).example()):
        for change in changes:
            def attend(*arguments: Any, change: Any = change, **options: Any) -> Any:
                return change(*attention(*arguments, **options))

            for check in (*kit.FORWARD_PROPERTIES, probes):
                refused(TypeError, "the function under test must return", check, attend, example)
    for check in kit.GRADIENT_PROPERTIES:
        refused(TypeError, "gradients need an example with do", check, lambda *_: None, example.but(do=None, dlse=None))


def rows_may_be_low(library: ModuleType) -> None:
    """Each of some seeds draws a row whose scores all lie far below 0, whatever the sign of the scale."""
    strategies = part(library, "testing.strategies")
    for scale in (None, -0.5, 1e-3):
        example = strategies.Structure(seqlen_q=3, seqlen_kv=2, scale=scale, has_low_rows=True).example()
        first = example.q[..., :1] @ example.k[..., :1].swapaxes(-1, -2) * example.problem.softmax_scale
        assert (first[:, ::2] <= -2000).all() and (first[:, 1] == 0).all()
    assert all(any(drawn_low_rows(strategies, number)) for number in range(5))


def drawn_low_rows(strategies: ModuleType, number: int) -> list[bool]:
    """Return, for each of a hundred structures of a seed, True if it has low rows."""
    drawn = []

    @settings(max_examples=100, phases=[Phase.generate], database=None, deadline=None)
    @seed(number)
    @given(strategies.structures(most_scores=1 << 12, widest=8))
    def collect(structure: Any) -> None:
        drawn.append(structure.has_low_rows)

    collect()
    return drawn


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
    functions_return_what_they_must: {
        "an array is unpacked": Edit(
            ASSERTIONS, "as_results", "several = isinstance(results, (tuple, list))",
            "several = results is not None",
        ),
        "a further result is dropped": Edit(
            ASSERTIONS, "as_results", "len(results) == len(shapes)", "len(results) >= len(shapes)"
        ),
        "a property without a claim passes": Edit(
            "testing/properties.py", "check_masked_keys_may_be_removed",
            "if not example.problem.seqlen_kv:\n    _run(attend, example)",
            "if not example.problem.seqlen_kv:\n    pass",
        ),
        "zeros stand for a do that is missing": Edit(
            "testing/properties.py", "_do", "if example.do is None:", "if False:"
        ),
    },
    rows_may_be_low: {
        "no row is low": Edit("testing/strategies.py", "_structures", "(False, False, True)", "(False, False, False)"),
        "low rows of a negative scale are high": Edit(
            "testing/strategies.py", "Structure._lowering", "-math.copysign(size, scale)", "-size"
        ),
    },
}  # fmt: skip
