"""The whole kit on one function: bounds, exact probes and properties, with one printed line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from ..arrays import Array, describe, int_reasons
from ..errors import collecting, refuse
from ..keywords import explains_keywords
from .assertions import Attend, Example, as_pair, as_results, assert_exact_probes, assert_within_bounds
from .properties import (
    FORWARD_PROPERTIES,
    GRADIENT_PROPERTIES,
    PAIR_PROPERTIES,
    Pull,
    check_non_finite_values_reach_what_they_should,
)
from .strategies import examples
from .tangents import KINDS, Moving, assert_tangents_within_bounds, with_tangents

Push = Callable[..., Sequence[Array]]
Property = Callable[..., None]
_PER_PROPERTY = 8  # a property gets this fraction of the examples, because the bounds detect nearly every fault
_NON_FINITE = check_non_finite_values_reach_what_they_should
_PHASES = (Phase.generate, Phase.shrink)
_ADDED = ("has_sink", "has_non_finite")  # options that add examples; all others apply to every example


class _Line(NamedTuple):
    """A line of the report: its name, the examples to draw and their number, and the check of one example."""

    name: str
    drawn: st.SearchStrategy[Example] | st.SearchStrategy[Moving]
    most: int
    check: Callable[..., float | None]

    def outcome(self, seed: int) -> tuple[int, AssertionError | None]:
        """Return how many examples were checked, and the failure with the smallest example, or None."""
        count = 0

        @hypothesis.seed(seed)
        @settings(
            max_examples=self.most, deadline=None, database=None, derandomize=False, print_blob=False,
            report_multiple_bugs=False, suppress_health_check=tuple(HealthCheck), phases=_PHASES,
        )  # fmt: skip
        @hypothesis.given(self.drawn)
        def test(example: Example | Moving) -> None:
            nonlocal count
            count += 1
            self.check(example)

        try:
            test()
        except AssertionError as failure:
            return count, failure
        return count, None


@explains_keywords
def check(
    attend: Attend,
    gradients: Pull | None = None,
    *,
    tangents: Push | None = None,
    options: Mapping[str, Any] | None = None,
    properties: Sequence[Property] | None = None,
    max_examples: int = 200,
    seed: int = 0,
) -> None:
    """Test an attention function with the whole kit, and print one line for each property.

    Parameters
    ----------
    attend : callable
        The function under test, `(q, k, v, *, mask, scale) -> (o, lse)`, with a bool array or None as the mask. With
        ``options={"has_sink": True}`` it also takes `sink`, whose default must be None.
    gradients : callable, optional
        Its gradients, `(q, k, v, do, *, dlse, mask, scale) -> (dq, dk, dv)`; with a sink, `(dq, dk, dv, dsink)`.
    tangents : callable, optional
        Its derivatives along tangents, `(q, k, v, *, q_dot, k_dot, v_dot, mask, scale) -> (o_dot, lse_dot)`; with a
        sink, it also takes `sink_dot`. Only their bounds are checked.
    options : dict, optional
        Arguments of `examples`, to leave out what the functions do not support, such as
        ``{"dtypes": ["float32"], "grouped_heads": False}``. "has_sink" adds examples with sinks, and "has_non_finite"
        adds examples with NaN and infinities, which need `gradients`.
    properties : sequence, optional
        Elements of `FORWARD_PROPERTIES`, `GRADIENT_PROPERTIES` and `PAIR_PROPERTIES`. Default: all that apply to the
        functions. With an empty list, only bounds and exact probes are checked, which suits a function without masks.
    max_examples : int
        Number of examples for the bounds and for the exact probes. Each property gets an eighth of it.
    seed : int
        Seed of the examples.

    Raises
    ------
    AssertionError
        A property fails. The message has the smallest failing example of every property that fails, as source.
    TypeError
        A function does not return its arrays, or a property needs `gradients` or is not an element of the lists.
    UnsupportedProblem
        Another argument is invalid; the error lists all reasons.

    Notes
    -----
    Errors that the functions raise are not caught; Hypothesis adds the example to them.

    Examples
    --------
    >>> import cuflash
    >>> from cuflash import testing
    >>> def attend(q, k, v, *, mask, scale):
    ...     return cuflash.attention(q, k, v, mask=mask, scale=scale, return_lse=True)
    >>> few = {"dtypes": ["float64"], "longest": 20}
    >>> testing.check(attend, options=few, max_examples=16, properties=testing.FORWARD_PROPERTIES[:1])
    ok      o and lse are within their bounds               16 examples
    ok      the exact probes pass                           16 examples
    ok      order of keys does not matter                   2 examples
    """
    functions, options = (attend, gradients, tangents), {} if options is None else options
    lines = _lines(*functions, options, properties, max_examples, seed)
    failures = []
    for number, line in enumerate(lines):
        count, failure = line.outcome(seed + (number << 32))
        state, detail = ("ok", f"{count} examples") if failure is None else ("FAILED", str(failure).partition("\n")[0])
        print(f"{state:8}{line.name:48}{detail}", flush=True)
        failures += [] if failure is None else [f"{line.name}: {failure}"]
    if failures:
        raise AssertionError("\n\n".join([f"{len(failures)} of {len(lines)} properties fail", *failures]))


def _strategies(options: Mapping[str, Any], max_examples: int, seed: int) -> dict[str, st.SearchStrategy[Example]]:
    """Return strategies for plain examples (""), and for those that each option of `_ADDED` adds."""
    reasons = int_reasons(1, max_examples=max_examples) + int_reasons(0, seed=seed)
    if not isinstance(options, Mapping):
        refuse([*reasons, f"options must be a dict of arguments of testing.examples; got {describe(options)}"])
    reasons += [
        f"options must not have {name}, which changes the function: draw testing.examples({name}=True), and compare "
        f"the results with assert_within_bounds"
        for name in ("has_score", "has_dropout")
        if options.get(name)
    ]
    plain = {name: value for name, value in options.items() if name not in _ADDED}
    drawn = {}
    with collecting(reasons):
        added = {name: examples(**plain, **{name: options[name]}) for name in _ADDED if name in options}
        drawn = {"": examples(**plain), **added}
    refuse(reasons)
    return drawn


def _lines(
    attend: Attend,
    gradients: Pull | None,
    tangents: Push | None,
    options: Mapping[str, Any],
    properties: Sequence[Property] | None,
    most: int,
    seed: int,
) -> list[_Line]:
    """Return the lines of the report, after a check of all arguments."""
    drawn = _strategies(options, most, seed)
    if properties is None:
        is_finite = not options.get("has_non_finite")
        properties = [each for each in _of_functions(gradients) if not (is_finite and each is _NON_FINITE)]
    _require(properties, gradients)
    lines = []
    for suffix, name in (("", ""), (" with a sink", "has_sink"))[: 1 + bool(options.get("has_sink"))]:
        lines.append(_Line(f"o and lse are within their bounds{suffix}", drawn[name], most, partial(_forward, attend)))
        if gradients is not None:
            backward = partial(_backward, gradients)
            lines.append(_Line(f"gradients are within their bounds{suffix}", drawn[name], most, backward))
        if tangents is not None:
            along = drawn[name].flatmap(_moving)
            lines.append(_Line(f"tangents are within their bounds{suffix}", along, most, partial(_along, tangents)))
    lines.append(_Line("the exact probes pass", drawn[""], most, partial(assert_exact_probes, attend)))
    for each in properties:
        functions: tuple[Any, ...] = (attend,) if each in FORWARD_PROPERTIES else (gradients,)
        functions = (attend, gradients) if each in PAIR_PROPERTIES else functions
        of_property = drawn.get("has_non_finite" if each is _NON_FINITE else "", drawn[""])
        lines.append(_Line(_name_of(each), of_property, -(-most // _PER_PROPERTY), partial(each, *functions)))
    return lines


def _of_functions(gradients: Pull | None) -> tuple[Property, ...]:
    return FORWARD_PROPERTIES if gradients is None else (*FORWARD_PROPERTIES, *GRADIENT_PROPERTIES, *PAIR_PROPERTIES)


def _require(properties: Sequence[Property], gradients: Pull | None) -> None:
    for each in properties:
        if each not in (*FORWARD_PROPERTIES, *GRADIENT_PROPERTIES, *PAIR_PROPERTIES):
            raise TypeError(f"properties must be elements of lists such as FORWARD_PROPERTIES; got {describe(each)}")
        if each not in _of_functions(gradients):
            raise TypeError(f"gradients must be passed for the property {_name_of(each)!r}")


def _name_of(each: Property) -> str:
    return each.__name__.removeprefix("check_").replace("_", " ")


def _without_gradients(example: Example) -> Example:
    """Return an example of the forward pass alone, because exact gradients would take most of the time."""
    return example.but(do=None, dlse=None, origin=example.origin)


def _forward(attend: Attend, example: Example) -> float:
    forward = _without_gradients(example)
    o, lse = as_pair(attend(forward.q, forward.k, forward.v, **_keywords(forward)), forward)
    return assert_within_bounds(forward, o=o, lse=lse)


def _backward(gradients: Pull, example: Example) -> float:
    names = ("q", "k", "v") if example.sink is None else ("q", "k", "v", "sink")
    results = gradients(example.q, example.k, example.v, example.do, dlse=example.dlse, **_keywords(example))
    shapes = {f"d{name}": getattr(example, name).shape for name in names}
    arrays: dict[str, Any] = dict(zip(shapes, as_results(results, shapes, example)))
    return assert_within_bounds(example, **arrays)


def _moving(example: Example) -> st.SearchStrategy[Moving]:
    """Return a strategy for an example of the forward pass with tangents of all of its arrays."""
    kinds = dict.fromkeys(("q", "k", "v") if example.sink is None else ("q", "k", "v", "sink"), st.sampled_from(KINDS))
    forward = _without_gradients(example)
    return st.builds(with_tangents, st.just(forward), st.fixed_dictionaries(kinds), st.integers(0, 99))


def _along(tangents: Push, moving: Moving) -> float:
    example, dots = moving.example, {f"{name}_dot": x for name, x in moving.tangents.items()}
    shapes = {"o_dot": example.problem.o_shape(), "lse_dot": example.problem.lse_shape()}
    results = tangents(example.q, example.k, example.v, **dots, **_keywords(example))
    return assert_tangents_within_bounds(moving, **dict(zip(shapes, as_results(results, shapes, example))))


def _keywords(example: Example) -> dict[str, Any]:
    sink = {} if example.sink is None else {"sink": example.sink}
    return {"mask": example.dense_mask, "scale": example.scale, **sink}
