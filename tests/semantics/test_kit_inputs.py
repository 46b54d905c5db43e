"""The testing kit compares all that it receives, refuses what it cannot compare, and soon detects common faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings

from cuflash import masks, reference, scores, testing
from cuflash.testing import Example, Structure, assert_exact_probes, assert_non_finite, assert_within_bounds

WITH_GRADIENTS = Structure(num_heads=2, num_kv_heads=2, seqlen_q=3, seqlen_kv=5, dtype="float64").example()
FORWARD_ONLY = WITH_GRADIENTS.but(do=None, dlse=None)
NAMES = ("o", "lse", "dq", "dk", "dv")


def attend(q: Any, k: Any, v: Any, *, mask: Any, scale: Any) -> Any:
    return reference.attention(q, k, v, mask=mask, scale=scale)


def pull(q: Any, k: Any, v: Any, do: Any, *, dlse: Any, mask: Any, scale: Any) -> Any:
    return reference.attention_vjp(q, k, v, do, dlse, mask=mask, scale=scale)


# Results


@pytest.mark.parametrize("check", [assert_within_bounds, assert_non_finite])
def test_no_result_is_an_error(check: Callable[..., float]) -> None:
    with pytest.raises(TypeError, match="^results must be at least one of o, lse, dq, dk, dv, dsink, others; got none"):
        check(WITH_GRADIENTS)


def test_no_gradient_of_a_score_is_no_result() -> None:
    with pytest.raises(TypeError, match="^results must be at least one of o, lse"):
        assert_within_bounds(WITH_GRADIENTS, others={})
    with pytest.raises(TypeError, match="^others must be a dict of the score's gradients by name; got None"):
        assert_within_bounds(WITH_GRADIENTS, o=WITH_GRADIENTS.exact.o, others=None)
    with pytest.raises(TypeError, match="^dslopes needs an example with slopes in wrt$"):
        assert_within_bounds(WITH_GRADIENTS, others={"slopes": np.zeros(2)})


class Foreign:
    """An array of another library whose elements cannot be read."""

    shape = (2, 3, 8)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("call .cpu() first\nlong story")


@pytest.mark.parametrize("check", [assert_within_bounds, assert_non_finite])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_an_array_is_an_error_of_words(check: Callable[..., float], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an array; got None: the function under test must return it"):
        check(WITH_GRADIENTS, **{name: None})
    with pytest.raises(TypeError, match=rf"^{name} must be an array that NumPy reads; got Foreign: call .cpu\(\) fir"):
        check(WITH_GRADIENTS, **{name: Foreign()})
    with pytest.raises(TypeError, match=f"^{name} must be an array that NumPy reads; got list: "):
        check(WITH_GRADIENTS, **{name: [[1.0], [1.0, 2.0]]})


@pytest.mark.parametrize("check", [assert_within_bounds, assert_non_finite])
@pytest.mark.parametrize("name", NAMES)
def test_another_shape_or_a_dtype_that_holds_less_fails(check: Callable[..., float], name: str) -> None:
    exact = np.asarray(getattr(WITH_GRADIENTS.exact, name), np.float64)
    for shaped in (exact[:1], exact[0], exact[..., :1], exact[None], exact.ravel(), exact.ravel()[0], exact[:0]):
        with pytest.raises(AssertionError, match=f"^{name} has shape .*, should have "):
            check(WITH_GRADIENTS, **{name: shaped})
    for dtype in (np.float32, np.float16, np.int64, bool, complex, object, "U9"):
        with pytest.raises(AssertionError, match=f"^{name} has dtype .*, should have float64 or a wider one\n"):
            check(WITH_GRADIENTS, **{name: exact.astype(dtype)})


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_a_result_of_16_bits_may_not_be_of_the_other_16_bits(name: str) -> None:
    example = Structure(seqlen_q=3, seqlen_kv=5, dtype="float16").example()
    with pytest.raises(AssertionError, match=f"^{name} has dtype bfloat16, should have float16 or a wider one"):
        exact = np.asarray(getattr(example.exact, name))
        assert_within_bounds(example, **{name: exact.astype(ml_dtypes.bfloat16)})
    assert_within_bounds(example, **{name: exact.astype(np.float32)})


@pytest.mark.parametrize("check", [assert_within_bounds, assert_non_finite])
def test_gradients_need_an_example_that_has_them(check: Callable[..., float]) -> None:
    zeros = np.zeros(FORWARD_ONLY.q.shape)
    for name in ("dq", "dk", "dv"):
        with pytest.raises(TypeError, match=f"^{name} needs an example with do$"):
            check(FORWARD_ONLY, **{name: zeros})
    with pytest.raises(TypeError, match="^dq needs an example with do; dsink needs an example with do; dsink needs an"):
        check(FORWARD_ONLY, dq=zeros, dsink=zeros)
    with pytest.raises(TypeError, match="^dsink needs an example with sink$"):
        check(WITH_GRADIENTS, dsink=zeros)


def test_a_result_of_another_name_is_refused() -> None:
    with pytest.raises(TypeError, match="^results must be among o, lse, dq, dk, dv, dsink; got out$"):
        assert_non_finite(WITH_GRADIENTS, out=WITH_GRADIENTS.exact.o)


def test_every_gradient_of_a_score_is_compared() -> None:
    example = WITH_GRADIENTS.but(score=scores.alibi(np.array([0.5, 0.25])), wrt=("slopes",))
    exact = np.asarray(example.exact.others["slopes"], np.float64)
    assert assert_within_bounds(example, others={"slopes": exact}) <= 1
    with pytest.raises(AssertionError, match=r"^dslopes\["):
        assert_within_bounds(example, others={"slopes": exact + 1})
    with pytest.raises(AssertionError, match="^dslopes has shape"):
        assert_within_bounds(example, others={"slopes": exact[:1]})


@pytest.mark.parametrize("empty", [{"seqlen_q": 0}, {"q_batch": (0,), "k_batch": (0,), "v_batch": (0,)}])
def test_nothing_is_compared_only_where_there_is_nothing(empty: dict[str, Any]) -> None:
    example = Structure(**{"seqlen_q": 2, "seqlen_kv": 3, **empty}).example()
    o = example.exact.o.astype(np.float32)
    assert o.size == 0 and assert_within_bounds(example, o=o) == 0
    with pytest.raises(AssertionError, match="^o has shape"):
        assert_within_bounds(example, o=np.zeros((0, 0)))


@pytest.mark.parametrize("value", [None, "x", 1j, True, [None]])
def test_only_numbers_can_be_within(value: Any) -> None:
    with pytest.raises(TypeError, match="^x must be an array of real numbers; got an array of shape"):
        testing.assert_within("x", value, np.zeros(np.shape(value)), np.inf)
    with pytest.raises(TypeError, match="^x must be an array of real numbers"):
        testing.assert_within("x", np.zeros(np.shape(value)), value, np.inf)


@pytest.mark.parametrize(
    ("ratio", "message"),
    [(1.02, "1.02"), (1.0004, "1.0004"), (5.04, "5"), (130.0, "1.3e+02"), (1 + 2**-52, "1.0000000000000002")],
)
def test_what_is_slightly_over_the_bound_says_by_how_much(ratio: float, message: str) -> None:
    with pytest.raises(AssertionError, match=f" {message.replace('+', '[+]')} times its bound of 1\n"):
        testing.assert_within("x", np.array([ratio]), np.zeros(1), np.ones(1))


# Functions under test

RETURNS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "o alone": (lambda o, lse: o, r"one array of shape \(2, \d, 8\)"),
    "nothing": (lambda o, lse: None, "None"),
    "three arrays": (lambda o, lse: (o, lse, lse), "tuple of 3: one array of shape"),
    "a pair without lse": (lambda o, lse: (o, None), r"tuple of 2: one array of shape \(2, \d, 8\), None"),
    "lists of numbers": (lambda o, lse: o.tolist(), "list of 2: list, list"),
    "a list of one": (lambda o, lse: [o], "list of 1: one array of shape"),
    "a foreign array": (lambda o, lse: Foreign(), r"one array of shape \(2, \d, 8\)"),
    "a dictionary": (lambda o, lse: {"o": o, "lse": lse}, "dict"),
}


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("check", [*testing.FORWARD_PROPERTIES, assert_exact_probes], ids=lambda check: check.__name__)
def test_a_function_must_return_o_and_lse(check: Callable[..., Any], returned: str) -> None:
    change, came = RETURNS[returned]
    with pytest.raises(TypeError, match=rf"^the function under test must return \(o, lse\); got {came}"):
        check(lambda *args, **options: change(*attend(*args, **options)), WITH_GRADIENTS)


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("check", testing.GRADIENT_PROPERTIES, ids=lambda check: check.__name__)
def test_a_function_of_gradients_must_return_three_arrays(check: Callable[..., Any], returned: str) -> None:
    change, _ = RETURNS[returned]
    several = {"three arrays": lambda dq, dk, dv: (dq, dk), "a foreign array": lambda dq, dk, dv: Foreign()}
    wrong = several.get(returned, lambda dq, dk, dv: change(dq, dk))
    with pytest.raises(TypeError, match=r"^the function under test must return \(dq, dk, dv\); got "):
        check(lambda *args, **options: wrong(*pull(*args, **options)), WITH_GRADIENTS)
    with pytest.raises(TypeError, match="^gradients need an example with do$"):
        check(pull, FORWARD_ONLY)


@pytest.mark.parametrize("check", testing.PAIR_PROPERTIES, ids=lambda check: check.__name__)
def test_both_functions_must_return_their_arrays(check: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^the function under test must return \(o, lse\); got one array"):
        check(lambda *args, **options: attend(*args, **options)[0], pull, WITH_GRADIENTS)
    with pytest.raises(TypeError, match=r"^the function under test must return \(dq, dk, dv\); got tuple of 2"):
        check(attend, lambda *args, **options: pull(*args, **options)[:2], WITH_GRADIENTS)
    with pytest.raises(TypeError, match="^gradients need an example with do$"):
        check(attend, pull, FORWARD_ONLY)


VACUOUS = {
    "no keys": Structure(seqlen_q=2, seqlen_kv=0, dtype="float64").example(),
    "widest heads": Structure(head_dim=256, dtype="float64").example(),
    "shared operands": Structure(q_batch=(2,), k_batch=(1,), v_batch=(1,), dtype="float64").example(),
}


@pytest.mark.parametrize("name", VACUOUS)
def test_a_property_that_says_nothing_of_an_example_still_looks_at_the_function(name: str) -> None:
    example = VACUOUS[name]
    for check in testing.FORWARD_PROPERTIES:
        with pytest.raises(TypeError, match="^the function under test must return"):
            check(lambda *args, **options: None, example)
    for check in testing.GRADIENT_PROPERTIES:
        with pytest.raises(TypeError, match="^the function under test must return"):
            check(lambda *args, **options: None, example)


@pytest.mark.parametrize(
    "change", [lambda o, lse: (o[:0], lse), lambda o, lse: (o[..., 0], lse), lambda o, lse: (o, o)]
)
def test_results_of_another_shape_break_every_property(change: Callable[[Any, Any], Any]) -> None:
    def function(*args: Any, **options: Any) -> Any:
        return change(*attend(*args, **options))

    for check in testing.FORWARD_PROPERTIES:
        with pytest.raises(AssertionError, match="^(o|lse) has shape"):
            check(function, WITH_GRADIENTS)
    with pytest.raises(AssertionError, match="^(o|lse) has shape"):
        testing.assertions.assert_wide_accumulators(function, np.float16)


def test_a_list_of_two_arrays_is_a_pair() -> None:
    for check in testing.FORWARD_PROPERTIES:
        check(lambda *args, **options: list(attend(*args, **options)), WITH_GRADIENTS)


# Strategies detect the common faults


def own_attention(example: Example, fault: str) -> tuple[Any, Any]:
    """Compute attention in float64 with one of three common faults."""
    q, k, v = (x.astype(np.float64) for x in (example.q, example.k, example.v))
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    if group > 1:
        several = (lambda x: np.concatenate([x] * group, axis=-3)) if fault == "heads are grouped by modulo" else None
        k, v = ((several(x) if several else x.repeat(group, axis=-3)) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if example.scale is None else example.scale)
    s = s if example.mask is None else np.where(example.dense_mask, s, -np.inf)
    first = 0 if fault == "the running maximum starts at 0" else -np.inf
    peak = s.max(axis=-1, keepdims=True, initial=first)
    shift = np.where(np.isfinite(peak), peak, 0) if fault != "no maximum is subtracted" else 0
    with np.errstate(all="ignore"):
        weights = np.exp(s - shift)
        total = weights.sum(axis=-1, keepdims=True)
        o, lse = weights @ v / np.where(total == 0, 1, total), (shift + np.log(total))[..., 0]
    return o.astype(np.float32), lse.astype(np.float32)


FAULTS = ("heads are grouped by modulo", "no maximum is subtracted", "the running maximum starts at 0")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_usual_fault_is_found_in_a_hundred_examples_of_any_seed(fault: str) -> None:
    for number in range(4):

        @settings(max_examples=100, phases=[Phase.generate], database=None, deadline=None)
        @seed(number)
        @given(testing.examples(dtypes=["float32"]))
        def is_right(example: Example) -> None:
            right, wrong = (own_attention(example, name) for name in ("", fault))
            # exact answers are slow to compute
            if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(right, wrong)):
                assert_within_bounds(example, o=wrong[0], lse=wrong[1])

        with pytest.raises(AssertionError, match=r"^(o|lse)\["):
            is_right()


def test_low_rows_lie_far_below_the_others() -> None:
    for scale in (None, 1e-3, -0.5, 1e4):
        for head_dim in (1, 8, 256):
            structure = Structure(
                num_heads=2, seqlen_q=4, seqlen_kv=3, head_dim=head_dim, scale=scale, has_low_rows=True, dtype="float16"
            )
            example = eval(repr(structure.example()), {"Structure": Structure, "masks": masks})
            q, k = example.q.astype(float), example.k.astype(float)
            first = q[..., :1] @ k[..., :1].swapaxes(-1, -2) * (head_dim**-0.5 if scale is None else scale)
            assert (first[:, ::2] <= -2000).all() and (first[:, 1::2] == 0).all()
            assert np.isfinite(example.exact.lse).all()
