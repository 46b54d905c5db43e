"""`testing.check` runs the whole kit on a function, prints one line per property, and detects common faults."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from support.executors import is_long

import cuflash
from cuflash import UnsupportedProblem, masks, reference, testing
from cuflash.testing import _check

FEW: dict[str, Any] = {"dtypes": ["float64"], "longest": 20, "most_rows": 60}
ONE = testing.FORWARD_PROPERTIES[:1]


def narrowed(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype).astype(x.dtype)


def scores_of(q: Any, k: Any, v: Any, mask: Any, scale: Any, fault: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return scores and values of each query head over the whole batch, and the mask, with a fault in any of them."""
    wide = np.float32 if fault == "float32 arithmetic for float64" else np.float64
    q, k, v = (np.asarray(x).astype(wide) for x in (q, k, v))
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        num_heads, num_kv_heads = q.shape[-3], k.shape[-3]
        heads = np.arange(num_heads)
        heads = heads % num_kv_heads if fault == "grouped by modulo" else heads // (num_heads // num_kv_heads)
        k, v = k[..., heads, :, :], v[..., heads, :, :]
    distance = np.arange(k.shape[-2]) - np.arange(q.shape[-2])[:, None]
    if fault == "causal aligned to the first key":
        mask = distance <= 0
    if fault == "window too wide by one":
        shift = k.shape[-2] - q.shape[-2]
        mask = (distance <= shift) & (distance >= shift - 4)
    s = q @ k.swapaxes(-1, -2) * wide(q.shape[-1] ** -0.5 if scale is None else scale)
    batch = np.broadcast_shapes(s.shape[:-2], v.shape[:-2])
    s, v = np.broadcast_to(s, (*batch, *s.shape[-2:])), np.broadcast_to(v, (*batch, *v.shape[-2:]))
    fill = {"masked by -1e4": -1e4, "masked by -1e9": -1e9}.get(fault, -np.inf)
    s = s if mask is None else np.where(mask, s, fill)
    if fault == "last partial tile dropped" and s.shape[-1] > 64:
        whole = s.shape[-1] // 64 * 64
        s, v = s[..., :whole], v[..., :whole, :]
    return s, v, batch


def summed(p: np.ndarray, v: np.ndarray, fault: str) -> np.ndarray:
    """Return p v, summed or rounded as a fault does it."""
    kinds = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    way, _, dtype = fault.partition(" in ")
    if way == "weights":
        p = narrowed(p, kinds[dtype])
    if way != "sums":
        return p @ v
    o = np.zeros((*p.shape[:-1], v.shape[-1]), p.dtype)
    for j in range(p.shape[-1]):
        o = narrowed(o + p[..., j, None] * v[..., j, None, :], kinds[dtype])
    return o


def rescaled_never(s: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sums of an online softmax that raises its maximum without rescaling earlier sums."""
    o, total, peak = np.zeros((*s.shape[:-1], v.shape[-1])), np.zeros((*s.shape[:-1], 1)), -np.inf
    for first in range(0, s.shape[-1], 64):
        tile = s[..., first : first + 64]
        peak = np.maximum(peak, tile.max(axis=-1, keepdims=True))
        p = np.exp(tile - np.where(np.isfinite(peak), peak, 0))
        o, total = o + p @ v[..., first : first + 64, :], total + p.sum(axis=-1, keepdims=True)
    return o, total, np.broadcast_to(peak, total.shape)


def attention(q: Any, k: Any, v: Any, *, mask: Any = None, scale: Any = None, sink: Any = None, fault: str = "") -> Any:
    """Compute attention in float64, with one of the common faults."""
    with np.errstate(all="ignore"):
        s, v, batch = scores_of(q, k, v, mask, scale, fault)
        peak = s.max(axis=-1, keepdims=True, initial=0 if fault == "running maximum from 0" else -np.inf)
        peak = np.zeros_like(peak) if fault == "no maximum subtracted" else peak
        logit = None if sink is None else np.broadcast_to(np.asarray(sink).astype(float), batch or (1,))
        if logit is not None:
            logit = np.roll(logit, fault == "sink of another head", axis=-1)
            logit = logit.reshape(*batch, 1, 1)
            peak = peak if fault == "sink outside of the maximum" else np.maximum(peak, logit)
        shift = peak if fault == "NaN in empty rows" else np.where(np.isfinite(peak), peak, 0)
        p = np.exp(s - shift)
        o, total = summed(p, v, fault), p.sum(axis=-1, keepdims=True)
        if fault == "sums never rescaled":
            o, total, peak = rescaled_never(s, v)
            shift = np.where(np.isfinite(peak), peak, 0)
        of_keys = total
        if logit is not None:
            total = total + np.exp(logit - (0 if fault == "sink not shifted" else shift))
        o /= total + 1e-6 if fault == "epsilon in the denominator" else np.where(total == 0, total * 0 + 1, total)
        lse = (shift + np.log(of_keys if fault == "lse without the sink" else total))[..., 0]
        lse = narrowed(lse, np.float16) if fault == "lse in float16" else lse
    return o.astype(q.dtype), lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


def gradients(q: Any, k: Any, v: Any, do: Any, *, dlse: Any, mask: Any, scale: Any, fault: str = "") -> Any:
    """Compute the specification's gradients, with one of the common faults."""
    if dlse is not None:
        dlse = {"dlse ignored": None, "dlse with the wrong sign": -dlse}.get(fault, dlse)
    if fault == "delta left out":
        o, _ = reference.attention(q, k, v, mask, scale)
        delta = (np.asarray(do, float) * o).sum(axis=-1)
        dlse = delta if dlse is None else delta + dlse
    dq, dk, dv = reference.attention_vjp(q, k, v, do, dlse, mask, scale)
    if fault == "dk without the scale":
        dk = dk / (q.shape[-1] ** -0.5 if scale is None else scale)
    return tuple(x.astype(q.dtype) for x in (dq, dk, dv))


def of_library(q: Any, k: Any, v: Any, *, mask: Any, scale: Any, sink: Any = None) -> Any:
    return cuflash.attention(q, k, v, mask=mask, scale=scale, sink=sink, return_lse=True)


def gradients_of_library(
    q: Any, k: Any, v: Any, do: Any, *, dlse: Any, mask: Any, scale: Any, sink: Any = None
) -> tuple[Any, ...]:
    wrt = () if sink is None else ("sink",)
    _, vjp = cuflash.attention_vjp(q, k, v, mask=mask, scale=scale, sink=sink, wrt=wrt)
    results = vjp(do, dlse)
    return (*results, *(results[name] for name in wrt))


CAUSAL = {"masks": st.just(masks.Causal("bottom_right"))}
WINDOW = {"masks": st.just(masks.SlidingWindow(3, 0, align="bottom_right"))}
FORWARD = (
    "grouped by modulo", "no maximum subtracted", "running maximum from 0", "sums in bfloat16", "sums in float16",
    "masked by -1e4", "masked by -1e9", "epsilon in the denominator", "last partial tile dropped",
    "sums never rescaled", "weights in bfloat16", "weights in float16", "NaN in empty rows", "lse in float16",
    "float32 arithmetic for float64",
)  # fmt: skip
OF_SINKS = ("sink of another head", "sink outside of the maximum", "sink not shifted", "lse without the sink")
OF_GRADIENTS = ("dlse ignored", "dlse with the wrong sign", "delta left out", "dk without the scale")
FAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(FORWARD, {}),
    "causal aligned to the first key": {"options": CAUSAL, "properties": []},
    "window too wide by one": {"options": WINDOW, "properties": []},
    **dict.fromkeys(OF_SINKS, {"options": {"has_sink": True}}),
    **dict.fromkeys(OF_GRADIENTS, {}),
}


WITHIN = "o and lse are within their bounds"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_of_25_faults_is_found_with_the_default_settings(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call detects the fault; in a long run, with nine of ten seeds. Examples are not shrunk."""
    monkeypatch.setattr(_check, "_PHASES", (Phase.generate,))
    is_of_gradients = fault in OF_GRADIENTS
    attend = attention if is_of_gradients else partial(attention, fault=fault)
    pull = partial(gradients, fault=fault) if is_of_gradients else None
    named = "gradients are within their bounds" if is_of_gradients else WITHIN + " with a sink" * (fault in OF_SINKS)
    arguments: dict[str, Any] = {"options": {}, "properties": None} | FAULTS[fault]
    missed = 0
    for seed in range(10) if is_long() else [list(FAULTS).index(fault)]:
        lines = _check._lines(attend, pull, None, most=200, seed=seed, **arguments)
        ((number, line),) = (each for each in enumerate(lines) if each[1].name == named)
        missed += line.outcome(seed + (number << 32))[1] is None
    assert missed <= is_long()


def test_a_right_function_passes_and_prints_a_line_for_each_property(capsys: pytest.CaptureFixture[str]) -> None:
    testing.check(attention, gradients, options=FEW | {"has_non_finite": False}, max_examples=8)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(testing.FORWARD_PROPERTIES) + len(testing.GRADIENT_PROPERTIES) + 3
    assert lines[0] == "ok      o and lse are within their bounds               8 examples"
    assert all(line.startswith("ok      ") and line.endswith((" 8 examples", " 1 examples")) for line in lines)
    assert len({line[8:56] for line in lines}) == len(lines)


def test_a_failure_has_its_example_and_the_other_lines_still_run(capsys: pytest.CaptureFixture[str]) -> None:
    def doubled(*args: Any, **options: Any) -> Any:
        o, lse = attention(*args, **options)
        return 2 * o, lse

    with pytest.raises(AssertionError) as failed:
        testing.check(doubled, options=FEW, max_examples=24, properties=ONE)
    message = str(failed.value)
    lines = capsys.readouterr().out.splitlines()
    assert message.startswith(f"2 of 3 properties fail\n\n{WITHIN}: o[0, 0, 0] is ")
    assert "\nStructure(head_dim=1, value_dim=1, dtype='float64', has_dlse=False).example()\n" in message
    assert [line.split()[0] for line in lines] == ["FAILED", "FAILED", "ok"]
    assert "\n\nthe exact probes pass: " in message and lines[0].startswith(f"FAILED  {WITHIN}   ")


def test_sinks_and_non_finite_operands_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = testing.PAIR_PROPERTIES[-1:]
    both = FEW | {"has_sink": True, "has_non_finite": True}
    testing.check(of_library, gradients_of_library, options=both, max_examples=16, properties=pairs)
    named = [line[8:56].strip() for line in capsys.readouterr().out.splitlines()]
    within = [WITHIN, "gradients are within their bounds"]
    probes = ["the exact probes pass", "non finite values reach what they should"]
    assert named == [*within, *(f"{name} with a sink" for name in within), *probes]


def test_faults_that_only_added_examples_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check, "_PHASES", (Phase.generate,))
    unshifted = partial(attention, fault="lse without the sink")
    with pytest.raises(AssertionError, match=f"^1 of 3 properties fail\n\n{WITHIN} with a sink: "):
        testing.check(unshifted, options=FEW | {"has_sink": True}, max_examples=24, properties=[])

    def swallows(*args: Any, **options: Any) -> Any:
        return tuple(np.nan_to_num(x) for x in gradients_of_library(*args, **options))

    options, pairs = FEW | {"has_non_finite": True}, testing.PAIR_PROPERTIES[-1:]
    with pytest.raises(AssertionError, match="^1 of 4 properties fail\n\nnon finite values reach what they should: "):
        testing.check(of_library, swallows, options=options, max_examples=40, properties=pairs)


def tangents(q: Any, k: Any, v: Any, *, mask: Any, scale: Any, sink: Any = None, fault: str = "", **dots: Any) -> Any:
    """Compute the tangents of o and lse by the library, with one of the common faults."""
    sink_dot = dots.pop("sink_dot", None)
    moved = {} if sink is None or fault == "no tangent of the sink" else {"tangents": {"sink": sink_dot}}
    if fault == "no tangent of v":
        dots["v_dot"] = None
    _, (o_dot, lse_dot) = cuflash.attention_jvp(
        q, k, v, **dots, **moved, mask=mask, scale=scale, sink=sink, return_lse=True
    )
    if fault == "weights are not normalised":
        o_dot = o_dot + cuflash.attention(q, k, v, mask=mask, scale=scale, sink=sink) * lse_dot[..., None]
    return (o_dot, 2 * lse_dot) if fault == "twice the tangent of lse" else (o_dot, lse_dot)


OF_TANGENTS = "no tangent of v", "weights are not normalised", "twice the tangent of lse", "no tangent of the sink"


def check_of_tangents(library: Any, fault: str) -> None:
    """Check that right tangents pass, and that a fault is found in its line alone."""
    suffix = " with a sink" if "sink" in fault else ""
    options = FEW | ({"has_sink": True} if suffix else {})
    call = partial(library.testing.check, of_library, options=options, max_examples=24, properties=[])
    call(tangents=tangents)
    with pytest.raises(AssertionError, match=f"properties fail\n\ntangents are within their bounds{suffix}: "):
        call(tangents=partial(tangents, fault=fault))


@pytest.mark.parametrize("fault", OF_TANGENTS)
def test_tangents_are_checked(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check, "_PHASES", (Phase.generate,))
    check_of_tangents(cuflash, fault)


def test_equal_seeds_draw_equal_examples() -> None:
    def seen(seed: int) -> list[tuple[int, ...]]:
        shapes = []

        def attend(q: Any, k: Any, v: Any, *, mask: Any, scale: Any) -> Any:
            shapes.append((*q.shape, *k.shape))
            return attention(q, k, v, mask=mask, scale=scale)

        testing.check(attend, options=FEW, max_examples=4, properties=[], seed=seed)
        return shapes

    assert seen(3) == seen(3) != seen(4)


def test_errors_of_the_function_are_not_failures() -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        testing.check(broken, options=FEW)
    assert "Structure(" in "".join(raised.value.__notes__)
    with pytest.raises(TypeError, match=r"^the function under test must return \(o, lse\); got one array"):
        testing.check(lambda *args, **options: attention(*args, **options)[0], options=FEW)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"options": [1]}, UnsupportedProblem, "options must be a dict of arguments of testing.examples; got [1]"),
        ({"options": {"dtypes": ["int8"]}}, UnsupportedProblem, "dtypes must be "),
        ({"options": {"has_sink": 1}}, UnsupportedProblem, "has_sink must be True or False; got 1"),
        ({"options": {"has_score": True}}, UnsupportedProblem, "options must not have has_score, which changes the"),
        ({"max_examples": 0}, UnsupportedProblem, "max_examples must be an int of at least 1; got 0"),
        ({"seed": -1}, UnsupportedProblem, "seed must be an int of at least 0; got -1"),
        ({"properties": [attention]}, TypeError, "properties must be elements of lists such as FORWARD"),
        ({"properties": testing.GRADIENT_PROPERTIES}, TypeError, "gradients must be passed for the property 'grad"),
        ({"example": 3}, TypeError, "check() has no example: "),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as refused:
        testing.check(attention, **arguments)
    assert message in str(refused.value)


def test_all_invalid_arguments_are_reported_at_once() -> None:
    with pytest.raises(UnsupportedProblem) as refused:
        testing.check(attention, options={"tile": 0, "has_dropout": True}, max_examples=0, seed=-1)
    assert [reason.split(" ")[0] for reason in refused.value.reasons] == ["max_examples", "seed", "options", "tile"]
