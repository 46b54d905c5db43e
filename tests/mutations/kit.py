"""Planted faults in the testing kit: checks that pass without a comparison, and strategies that detect less."""

from __future__ import annotations

import contextlib
import io
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from mutations.planting import Edit
from mutations.python_guards import part
from test_check import check_of_tangents

SIGNS = (AssertionError, ValueError, TypeError, pytest.fail.Exception)  # exceptions with which a guard reports a fault


def refused(kind: type[Exception], words: str, check: Any, *arguments: Any, **options: Any) -> None:
    """Assert that a check raises an error of this kind with a text that begins with these words."""
    try:
        check(*arguments, **options)
    except (AssertionError, TypeError) as error:
        assert isinstance(error, kind) and re.match(words, str(error)), error
    else:
        raise AssertionError(f"{check.__name__} passed")


def results_are_compared(library: ModuleType) -> None:
    """Check that a missing result, None, a wrong shape, a narrower dtype, and gradients without do are refused."""
    kit, structure = part(library, "testing.assertions"), part(library, "testing.strategies").Structure
    check, non_finite = kit.assert_within_bounds, part(library, "testing.non_finite").assert_non_finite
    example = structure(num_heads=2, seqlen_q=3, seqlen_kv=5, dtype="float64").example()
    o = np.asarray(example.exact.o, np.float64)
    assert check(example, o=o) <= 1 and non_finite(example, o=o) <= 1
    for each in (check, non_finite):
        refused(TypeError, "results must be at least one of", each, example)
        refused(TypeError, "o must be an array; got None", each, example, o=None)
        refused(AssertionError, "o has shape", each, example, o=o[:1])
        refused(AssertionError, "o has dtype complex128", each, example, o=o.astype(complex))
        refused(AssertionError, "o has dtype float16", each, example, o=np.zeros(o.shape, np.float16))
        refused(TypeError, "dq needs an example with do", each, example.but(do=None, dlse=None), dq=o)
    refused(TypeError, "results must be at least one of", check, example, others={})
    refused(TypeError, "x must be an array of real", kit.assert_within, "x", 1j * o, o, np.inf)
    refused(AssertionError, r"x\[0\] .* off by 1, 1.004 times", kit.assert_within, "x", [1.004], [0.0], [1.0])


def every_line_is_checked(library: ModuleType) -> None:
    """Check that `check` runs each line, on the examples that its options add, and reports what fails."""
    kit = part(library, "testing")
    properties, few = kit.FORWARD_PROPERTIES[:1], {"dtypes": ["float64"], "longest": 8, "has_sink": True}

    def lines_of(attend: Any) -> list[str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(AssertionError):
            kit.check(attend, options=few, max_examples=24, properties=properties)
            text.write("passed")
        return text.getvalue().splitlines()

    def right(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return library.attention(q, k, v, return_lse=True, **options)

    def without_sinks(q: Any, k: Any, v: Any, *, mask: Any, scale: Any, sink: Any = None) -> Any:
        return right(q, k, v, mask=mask, scale=scale)

    for attend, states in ((right, ["ok", "ok", "ok", "ok", "passed"]), (without_sinks, ["ok", "FAILED", "ok", "ok"])):
        assert [line.split()[0] for line in lines_of(attend)] == states
    refused(TypeError, "gradients must be passed", kit.check, right, properties=kit.GRADIENT_PROPERTIES)


def tangents_are_compared(library: ModuleType) -> None:
    part(library, "testing")
    with contextlib.redirect_stdout(io.StringIO()):
        check_of_tangents(library, "twice the tangent of lse")
        check_of_tangents(library, "no tangent of the sink")


def arrays_have_negative_numbers(library: ModuleType) -> None:
    """Check that some drawn lengths, ids of queries and ids of keys are negative."""
    of, shape = part(library, "testing.mask_strategies"), part(library, "masks.shape").MaskShape((2,), 1, 5, 5)
    negative = set[str]()

    @settings(max_examples=100, phases=[Phase.generate], database=None, deadline=None)
    @seed(0)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        for draw_mask in (of._lengths, of._documents):
            held = vars(draw_mask(data.draw, shape)).items()
            negative.update(name for name, value in held if isinstance(value, np.ndarray) and (value < 0).any())

    collect()
    assert negative == {"q", "kv", "q_ids", "kv_ids"}, negative


ASSERTIONS = "testing/assertions.py"
CHECK = "testing/_check.py"
FAULTS = {
    every_line_is_checked: {
        "a failure is not reported": Edit(CHECK, "check", "if failures:", "if False:"),
        "examples have no sinks": Edit(CHECK, "_strategies", "{name: options[name]}", "{name: False}"),
        "functions get no sink": Edit(CHECK, "_keywords", '{"sink": example.sink}', "{}"),
        "a property needs no gradients": Edit(
            CHECK, "_require", "if each not in _of_functions(gradients):", "if False:"
        ),
    },
    tangents_are_compared: {
        "tangents are those of the results": Edit(
            CHECK, "_along", "moving, **dict(zip(shapes", "moving.scaled(0), **dict(zip(shapes"
        ),
        "sinks do not move": Edit(
            CHECK, "_moving", '("q", "k", "v") if example.sink is None else ("q", "k", "v", "sink")', '("q", "k", "v")'
        ),
        "only o moves": Edit(
            CHECK, "_along", "**dict(zip(shapes, as_results(results, shapes, example)))",
            "o_dot=as_results(results, shapes, example)[0]",
        ),
    },
    arrays_have_negative_numbers: {
        "lengths are at least 0": Edit("testing/mask_strategies.py", "_count", "count or -2", "count"),
        "ids are at least 0": Edit(
            "testing/mask_strategies.py", "_documents", "q_ids - (count + 1) // 2, kv_ids - (count + 1) // 2",
            "q_ids, kv_ids",
        ),
    },
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
