"""Planted faults in tangents of attention and of its gradients: in host passes, the specification, bounds and rules."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuflash import masks
from cuflash.testing import Structure
from cuflash.testing.tangents import Moving, assert_tangents_within_bounds, with_tangents
from mutations.planting import Edit
from mutations.python_guards import in_base_2
from test_bounds import check_overflow
from test_reference import check_shapes

import cuflash

SIGNS = (AssertionError, ValueError, TypeError, pytest.fail.Exception)  # exceptions with which a guard reports a fault
ROWS = np.arange(40)[:, None] % 3 > 0  # rows with keys; the others have none
STRUCTURE = Structure(
    q_batch=(2,), k_batch=(1,), v_batch=(2,), num_heads=4, num_kv_heads=2, seqlen_q=40, seqlen_kv=70, value_dim=6,
    dtype="float64", sink=(4,), sink_dtype="float64", mask=masks.Dense(ROWS & (np.arange(70) != 3)),
)  # fmt: skip
# Several steps, and a row without a key. The keys of later steps have other tangents than those of the first.
LONG = Structure(seqlen_q=9, seqlen_kv=40000, head_dim=4, value_dim=2, mask=masks.Lengths(q=8))
NAMES = ("q", "k", "v", "sink", "do", "dlse")
ARRAYS = ("temperature", "slope", "bias")


def curved(s, b, h, i, j, temperature, slope):
    return temperature[h] * 3 * np.tanh(s / 3) - np.where(i > j, slope[h] * np.sqrt(1 + s * s), np.minimum(s, 0.5))


def second(library: ModuleType, moving: Moving, **options: Any) -> dict[str, np.ndarray]:
    """Return o_dot, lse_dot, and the tangents of the gradients, computed by a library."""
    example = moving.example
    arrays, wrt = (example.q, example.k, example.v), options.pop("wrt", ())
    options = {"mask": example.dense_mask, "sink": example.sink, "scale": example.scale, **options}
    of_jvp, of_hvp = ({**each} for each in (moving.of_call(), moving.of_call(has_gradients=True)))
    extra = options.pop("tangents", {})
    for call in (of_jvp, of_hvp):
        call["tangents"] = call.get("tangents", {}) | extra
    _, (o_dot, lse_dot) = library.attention_jvp(*arrays, **of_jvp, **options, return_lse=True)
    wrt = (*wrt, "sink") if example.sink is not None else wrt
    _, _, dots = library.attention_hvp(*arrays, example.do, dlse=example.dlse, **of_hvp, **options, wrt=wrt)
    named = {f"d{name}": dots[name] for name in wrt}
    return dict(zip(("o_dot", "lse_dot", "dq", "dk", "dv"), (o_dot, lse_dot, *dots))) | named


def same(outputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, x in expected.items():
        np.testing.assert_allclose(outputs[name], x, rtol=1e-9, atol=1e-11, err_msg=name)


@in_base_2
def tangents_are_right(library: ModuleType) -> None:
    """Check that the copy's results are within bounds of the specification, with all tangents and with some."""
    for names in (NAMES, ("q",), ("k", "do"), ("v", "sink"), ("dlse",)):
        example = STRUCTURE.example().but(scale=None if "q" in names else 1.5)  # a scale above 1 is applied to scores
        moving = with_tangents(example, dict.fromkeys(names, "normal"))
        if not moving.of_call():
            continue
        outputs = second(library, moving)
        bounded = {name if name in ("o_dot", "lse_dot") else f"{name}_dot": x for name, x in outputs.items()}
        assert_tangents_within_bounds(moving, **bounded)
    example = LONG.example()
    moving = Moving(example, {"k": np.where(np.arange(40000)[:, None] < 20000, 0 * example.k, np.float32(4))})
    outputs = second(library, moving)
    assert_tangents_within_bounds(moving, **{name: outputs[name] for name in ("o_dot", "lse_dot")})


def every_feature_is_right(library: ModuleType) -> None:
    """Compare results with a score function, a bias, a sink and dropout with those of the installed library."""
    example, rng = STRUCTURE.example(), np.random.default_rng(0)
    arrays = {"temperature": 1 + 0.3 * rng.standard_normal(4), "slope": 0.1 * rng.standard_normal(4)}
    bias = rng.standard_normal((4, 40, 70))
    moving = with_tangents(example, dict.fromkeys(NAMES, "normal"))
    tangents = {name: rng.standard_normal(x.shape) for name, x in (arrays | {"bias": bias}).items()}
    every = [
        second(
            each, moving, bias=bias, score=each.scores.Score(curved, **arrays), dropout=each.Dropout(0.3, seed=5),
            tangents=tangents, wrt=ARRAYS,
        )
        for each in (library, cuflash)
    ]  # fmt: skip
    same(*every)
    hidden = np.where(np.eye(3) > 0, 0, -np.inf)
    x, moved = np.ones((3, 4)), {"bias": np.where(hidden == 0, 1, np.nan)}
    assert np.isfinite(library.attention_jvp(x, x, x, x, bias=hidden, tangents=moved)[1]).all()


def a_drift_costs_no_digits(library: ModuleType) -> None:
    """Check bounds in float16, which rounds o the most, for large tangents that are nearly equal for all keys."""
    for mask in (None, np.arange(90) % 9 == np.arange(60)[:, None] % 9):
        own = None if mask is None else masks.Dense(mask)
        example = Structure(num_heads=2, seqlen_q=60, seqlen_kv=90, head_dim=16, dtype="float16", mask=own).example()
        moving = with_tangents(example, {"k": "drift"})
        o_dot = library.attention_jvp(example.q, example.k, example.v, **moving.of_call(), mask=mask)[1]
        assert_tangents_within_bounds(moving, o_dot=o_dot)


def rules_hold(library: ModuleType) -> None:
    """Check the rules for rows without a key, with scores of -inf or NaN, and for calls without keys."""
    moving = with_tangents(STRUCTURE.example(), dict.fromkeys(NAMES, "normal"))
    outputs = second(library, moving)
    assert not outputs["o_dot"][..., ::3, :].any() and not outputs["dq"][..., ::3, :].any()
    wanted = np.broadcast_to(moving.tangents["sink"][:, None], (2, 4, 14))
    np.testing.assert_array_equal(outputs["lse_dot"][..., ::3], wanted)
    poisoned = {name: x.copy() for name, x in moving.tangents.items()}
    poisoned["do"][..., ::3, :] = np.nan
    poisoned["sink"][1] = np.inf
    example = moving.example.but(sink=np.where(np.arange(4) == 1, -np.inf, moving.example.sink))
    rows = second(library, Moving(example, poisoned))
    assert all(np.isfinite(rows[name]).all() for name in ("o_dot", "lse_dot", "dsink"))
    x, q = np.ones((2, 3), np.float32), np.array([[-np.inf, 1, 1], [1, 1, 1]], np.float32)
    _, (o_dot, lse_dot) = library.attention_jvp(q, x, x, x, x, return_lse=True)
    assert not o_dot[0].any() and lse_dot[0] == 0
    still, sink = np.zeros_like(x), np.array([np.nan], np.float32)
    seen = np.array([[0, 0], [1, 1]], bool)
    _, dots = library.attention_jvp(x, x, x, still, sink=sink, mask=seen, return_lse=True)
    assert all(np.isnan(each).all() for each in dots)
    moved = np.where(np.eye(2, 3, -1) > 0, np.nan, x)
    _, _, second_dots = library.attention_hvp(x, x, x, x, k_dot=moved, mask=library.masks.Lengths(kv=1))
    assert np.isfinite(second_dots.dq).all()
    nothing = Structure(num_heads=2, seqlen_q=5, seqlen_kv=0, sink=(2,)).example()
    empty = with_tangents(nothing, dict.fromkeys(NAMES, "normal"))
    dots = second(library, empty)
    np.testing.assert_array_equal(dots["lse_dot"], np.repeat(empty.tangents["sink"][:, None], 5, axis=1))
    np.testing.assert_allclose(dots["dsink"], empty.tangents["dlse"].sum(axis=-1), rtol=1e-6)


def bounds_are_sharp(library: ModuleType) -> None:
    """Check that the bounds of the copy equal those of the installed library."""
    error_bound = import_module(f"{library.__name__}.bounds").error_bound
    example, rng = STRUCTURE.example(), np.random.default_rng(0)
    moving = with_tangents(example, dict.fromkeys(NAMES, "normal"))
    slope = 0.1 * rng.standard_normal(4)
    arrays = {"temperature": 1 + slope, "slope": slope}
    operands = [x.astype(np.float16) for x in (example.q, example.k, example.v, example.do)]
    dots = {name: x if name in ("sink", "dlse") else x.astype(np.float16) for name, x in moving.tangents.items()}
    for extra in ({}, {"temperature": slope, "slope": slope}):
        outputs, expected = (
            bound(
                *operands, dlse=example.dlse, mask=example.dense_mask, sink=example.sink, tangents={**dots, **extra},
                **({"score": each.scores.Score(curved, **arrays), "wrt": ("slope",)} if extra else {}),
            )
            for each, bound in ((library, error_bound), (cuflash, cuflash.error_bound))
        )  # fmt: skip
        for name in ("o_dot", "lse_dot", "dq_dot", "dk_dot", "dv_dot", "dsink_dot"):
            np.testing.assert_allclose(getattr(outputs, name), getattr(expected, name), rtol=1e-9, err_msg=name)
        for name, bound in expected.others_dot.items():
            np.testing.assert_allclose(outputs.others_dot[name], bound, rtol=1e-9)


def the_reference_is_right(library: ModuleType) -> None:
    """Compare the copy's specification with the installed one, which complex steps confirm."""
    moving = with_tangents(STRUCTURE.example(), dict.fromkeys(NAMES, "normal"))
    example, factors = moving.example, np.random.default_rng(0).integers(0, 3, (2, 4, 40, 70))
    dots = {f"{name}_dot": x for name, x in moving.tangents.items()}
    fixed = {"mask": example.dense_mask, "sink": example.sink, "weight_factors": factors}
    curves = {
        "score": np.sin, "score_tangent": lambda s, s_dot: np.cos(s) * s_dot, "score_slope": np.cos,
        "score_slope_tangent": lambda s, s_dot: -np.sin(s) * s_dot,
    }  # fmt: skip
    of_jvp = {name: x for name, x in dots.items() if name not in ("do_dot", "dlse_dot")}
    for extra in ({}, curves):
        results = []
        for each in (import_module(f"{library.__name__}.reference"), cuflash.reference):
            first = {name: f for name, f in extra.items() if "slope" not in name}
            outputs = each.attention_jvp(example.q, example.k, example.v, **of_jvp, **fixed, **first)
            gradients = each.attention_hvp(
                example.q, example.k, example.v, example.do, dlse=example.dlse, **dots, **fixed, **extra
            )
            results.append(dict(enumerate((*outputs, *gradients))))
        same(*results)


def what_all_keys_share_cancels(library: ModuleType) -> None:
    """Check that a tangent that all keys share moves no output of the specification."""
    q, k, v = (np.random.default_rng(0).standard_normal((n, 3)).astype(np.longdouble) for n in (7, 9, 9))
    third = np.longdouble(1) / 3
    o_dot, _ = library.reference.attention_jvp(q, k, v, score_tangent=lambda s, s_dot: np.full(s.shape, third))
    assert np.abs(o_dot).max() <= 2.0**-100


def overflow_has_no_bound(library: ModuleType) -> None:
    """Check the bound on the tangent of dsink where o_dot overflows and the weight of the sink underflows."""
    q, k, v, k_dot = (np.array(x, np.float16)[None] for x in ([[1]], [[1], [1]], [[100], [-100]], [[1], [-1]]))
    named = {"do": np.ones((1, 1, 1), np.float16), "scale": 1e4, "sink": np.zeros(1, np.float16)}
    assert np.isinf(library.error_bound(q, k, v, **named, tangents={"k": k_dot}).dsink_dot).all()


def the_specification_refuses_shapes(library: ModuleType) -> None:
    check_shapes(library)


def sums_that_overflow_have_no_bound(library: ModuleType) -> None:
    check_overflow(library)


def gradients_read_the_rounded_o(library: ModuleType) -> None:
    """Check the bounds on gradients where o, of a weight that dropout doubled, overflows float16."""
    x, v = np.zeros((1, 1, 4), np.float16), np.full((1, 1, 4), 40000, np.float16)
    dropout, do = library.Dropout(0.5, seed=1), np.ones((1, 1, 4), np.float16)
    o, vjp = library.attention_vjp(x, x, v, dropout=dropout)
    assert np.isinf(o).all() and np.isnan(vjp(do).dq).all()
    bounds = library.error_bound(x, x, v, do, dropout=dropout, tangents={"do": do})
    assert all(np.isinf(each).all() for each in (bounds.dq, bounds.dk, bounds.dq_dot, bounds.dk_dot))


def wrong_tangents_are_refused(library: ModuleType) -> None:
    """Check that tangents of other arguments are refused, each with a different reason."""
    x = np.ones((2, 3, 4), np.float32)
    score = library.scores.Score(lambda s, b, h, i, j, ids: s + ids[j], ids=np.arange(3))
    for options, message in (
        ({}, "attention_jvp needs at least one tangent"),
        ({"q_dot": x[0]}, "q_dot must have q's shape"),
        ({"q_dot": x.astype(np.float64)}, "q_dot must have q's shape"),
        ({"q_dot": x, "score": score, "tangents": {"ids": x}}, "'ids', which holds int64"),
        ({"q_dot": x, "tangents": {"slope": x}}, "tangents must name arrays of this call, which are "),
        ({"q_dot": x, "tangents": {"q": x}}, "tangents must not name 'q'"),
        ({"q_dot": x, "tangents": {"q_dot": x}}, "'q_dot', the tangent of a tangent"),
        ({"q_dot": x, "tangents": x}, "tangents must be a dict"),
    ):
        library.attention_jvp(x, x, x, q_dot=x)
        try:
            library.attention_jvp(x, x, x, **options)
        except library.UnsupportedProblem as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
    try:
        library.plan(x, x, x, tangents="q", kernel="naive", device=library.DeviceSpec.gpu("H100"))
    except library.UnsupportedProblem as error:
        assert "kernel='naive' does not support tangents" in str(error), error
    else:
        raise AssertionError("a plan of kernels with tangents")


def results_do_not_overwrite_tangents(library: ModuleType) -> None:
    """Check tangents of calls that are asked to write o where a tangent is: they are right, or refused."""
    q, k, v, dot = np.random.default_rng(0).standard_normal((4, 2, 6, 4))
    expected = cuflash.attention_jvp(q, k, v, dot)[1]
    for _ in range(2):
        tangent = dot.copy()
        with suppress(library.UnsupportedProblem):
            assert np.allclose(library.attention_jvp(q, k, v, tangent, out=tangent)[1], expected)


HOST, OF_SCORES, RULES = "executors/host_tangents.py", "executors/tile_tangents.py", "planning/tangents.py"
BOUNDS, PROGRAM = "bounds/tangents.py", "scores/program.py"
FAULTS = {
    tangents_are_right: {
        "k's tangent moves no score": Edit(
            HOST, "HostTangents._raw", "(k.x, q.dot), (k.dot, q.x)", "(k.x, q.dot), (None, q.x)"
        ),
        "q's tangent moves no score": Edit(
            HOST, "HostTangents._raw", "(k.x, q.dot), (k.dot, q.x)", "(k.x, None), (k.dot, q.x)"
        ),
        "tangents of scores lack their power of two": Edit(
            HOST, "HostTangents._raw", "s_dot *= call.wide(call.score_factor)", "pass"
        ),
        "the sink does not move": Edit(HOST, "HostTangents._finish", "p_sink * (sink_dot - centers.c)", "0"),
        "the sink is taken relative to nothing": Edit(
            HOST, "HostTangents._finish", "p_sink * (sink_dot - centers.c)", "p_sink * sink_dot"
        ),
        "o does not move with the mean": Edit(
            HOST, "HostTangents._finish", "o_dot - rise[..., None] * call.read(\"o\", rows)", "o_dot"
        ),
        "lse moves relative to the center": Edit(
            HOST, "HostTangents._finish", "lse_dot = centers.c + rise", "lse_dot = rise"
        ),
        "the center changes in later steps": Edit(
            HOST, "_Centers.see", "where=is_first", "where=count > np.zeros_like(self.has_key)"
        ),
        "values do not move": Edit(HOST, "HostTangents.jvp_rows", 'if "v.dot" in', 'if "no v" in'),
        "weights of values' tangents are those of scores'": Edit(
            HOST, "HostTangents.jvp_rows", 'call.read("v.dot", keys).swapaxes(-1, -2) @ p',
            'call.read("v.dot", keys).swapaxes(-1, -2) @ f_dot',
        ),
        "delta does not move with o": Edit(
            HOST, "HostTangents.backward_deltas", 'np.vecdot(do.x, call.read("o.dot", rows))', "0 * np.vecdot(do.x, o)"
        ),
        "delta does not move with do": Edit(
            HOST, "HostTangents.backward_deltas", "delta_dot += np.vecdot(do.dot, o)", "pass"
        ),
        "dlse does not move": Edit(
            HOST, "HostTangents.backward_deltas", '("dlse", delta), ("dlse.dot", delta_dot)', '("dlse", delta),'
        ),
        "dP does not move with v": Edit(
            HOST, "HostTangents._tile", "(v.x, do.dot), (v.dot, do.x)", "(v.x, do.dot), (None, do.x)"
        ),
        "dQ leaves k's tangent out": Edit(HOST, "HostTangents.column_terms", ", (ds, k.dot))", ",)"),
        "dK leaves q's tangent out": Edit(HOST, "HostTangents.column_terms", "added(dk, ds @ q.dot)", "dk"),
        "dV leaves do's tangent out": Edit(HOST, "HostTangents.column_terms", "added(dv, p @ do.dot)", "dv"),
        "P_dot is relative to nothing": Edit(
            HOST, "HostTangents._tile", "np.subtract(call.wide(0) if s_dot is None else s_dot, lse_dot[..., None, :],",
            "np.subtract(call.wide(0) if s_dot is None else s_dot, 0 * lse_dot[..., None, :],",
        ),
        "the sink's gradient does not move with the sink": Edit(
            HOST, "HostTangents.sink_gradient", "(sink_dot - arrays[\"lse.dot\"]) * delta + delta_dot", "delta_dot"
        ),
    },
    every_feature_is_right: {
        "dropped weights move": Edit(HOST, "HostTangents.jvp_rows", "dropped.apply(f_dot)", "pass"),
        "dropped weights carry values' tangents": Edit(HOST, "HostTangents.jvp_rows", "dropped.apply(p)", "pass"),
        "the mean leaves dropped weights out": Edit(
            HOST, "HostTangents.jvp_rows", "total = total + np.ones(p.shape[-2], wide) @ f_dot",
            "total = total + np.ones(p.shape[-2], wide) @ (f_dot if dropped is None else f_dot * ~dropped.where)",
        ),
        "dP_dot is not dropped": Edit(HOST, "HostTangents._tile", "dropped.apply_to_gradients(dp_dot)", "pass"),
        "P_dot is not dropped in dV": Edit(HOST, "HostTangents.column_terms", "dropped.apply(p_dot)", "pass"),
        "slopes do not move": Edit(
            OF_SCORES, "ScoreTangents.gradients", "df_dot * values[slope] + df * values[slope_dot]",
            "df_dot * values[slope]",
        ),
        "slopes of arrays do not move": Edit(
            OF_SCORES, "ScoreTangents.gradients", "df_dot * values[by_load] + df * values[by_load_dot]",
            "df_dot * values[by_load]",
        ),
        "captured arrays do not move": Edit(
            PROGRAM, "_ForwardSweep._tangent", "return self.builder.load(self._dots[value], args)", "return self.zero"
        ),
        "a choice takes the other tangent": Edit(
            PROGRAM, "_ForwardSweep._tangent", "for a in args[1:]", "for a in args[:0:-1]"
        ),
        "a tangent has one term": Edit(PROGRAM, "_ForwardSweep._tangent", 'self.apply("add", total, term)', "total"),
        "hidden keys are in the center": Edit(
            HOST, "HostTangents._center", "np.copyto(f_dot, 0, where=p == 0)", "pass"
        ),
    },
    a_drift_costs_no_digits: {
        "tangents are relative to nothing": Edit(
            HOST, "_Centers.see", "np.copyto(self.c, mean, where=is_first)", "pass"
        ),
        "masked keys count": Edit(HOST, "HostTangents.jvp_rows", "x in (p, f_dot, is_seen)", "x in (p, f_dot)"),
    },
    rules_hold: {
        "a row of -inf is multiplied": Edit(
            HOST, "HostTangents._finish", "np.where(lse == -np.inf, 0, lse_dot)", "lse_dot"
        ),
        "NaN of lse is lost": Edit(
            HOST, "HostTangents._finish", "is_nan = np.isnan(lse)", "is_nan = np.isnan(lse) & False"
        ),
        "a sink of -inf moves": Edit(
            HOST, "HostTangents._finish", "np.where(sink == -np.inf, 0, p_sink * (sink_dot - centers.c))",
            "p_sink * (sink_dot - centers.c)",
        ),
        "do_dot of rows without keys counts": Edit(
            HOST, "HostTangents.sink_gradient", "(np.isnan(delta) | np.isnan(delta_dot))", "np.isnan(delta)"
        ),
        "keys past a length reach dq": Edit(HOST, "HostTangents.column_terms", "np.isfinite(each).all()", "True"),
        "without keys lse does not move": Edit(
            "executors/without_keys.py", "_jvp", 'if "sink.dot" in arrays else 0', "if False else 0"
        ),
        "without keys dlse does not move": Edit(
            "executors/without_keys.py", "_backward_jvp", 'arrays.get("dlse.dot")', 'arrays.get("dlse")'
        ),
    },
    bounds_are_sharp: {
        "lse has no error": Edit(
            BOUNDS, "push_tolerances", "eta = forward.eta + forward.tol_lse +", "eta = forward.eta +"
        ),
        "o has no error": Edit(BOUNDS, "push_tolerances", "+ spread * forward.tol_o\n", "\n"),
        "tangents of scores have no error": Edit(BOUNDS, "push_tolerances", "+ p * e_f +", "+"),
        "the center is the mean": Edit(
            BOUNDS, "push_tolerances", "np.where(allowed, np.abs(from_mean) + spread, 0)", "np.abs(from_mean)"
        ),
        "weights of values' tangents are exact": Edit(
            BOUNDS, "push_tolerances", "z * (p_excess + rounding * p_larger + np.minimum(p, model.wp))", "z * 0 * p"
        ),
        "o_dot has no error": Edit(
            BOUNDS, "_delta_tangents", "np.abs(do_dot) * tol_o + np.abs(do) * push.tol_o_dot",
            "np.abs(do_dot) * tol_o",
        ),
        "slopes' tangents have no error": Edit(BOUNDS, "_through_slopes", "+ pushed.e_slope_dot * larger", ""),
        "terms of slopes' tangents are left out": Edit(
            "bounds/captured.py", "Captured.second_tolerances", "for load in pushed.loads_dot", "for load in ()"
        ),
        "lse_dot has no error": Edit(BOUNDS, "_second_finals", "push.e_final + push.tol_lse_dot", "push.e_final"),
    },
    the_reference_is_right: {
        "the mean does not count": Edit("reference.py", "_Pushed.of", "(rest - correction[..., None])", "moved"),
        "factors multiply the mean": Edit(
            "reference.py", "_Pushed.of", "sum(probability * change,", "sum(_times(probability * change, factors),"
        ),
        "dK leaves q's tangent out": Edit("reference.py", "attention_hvp", "+ turned @ q_and_dot[1]", ""),
        "the sink stands still": Edit("reference.py", "attention_hvp", "(move - pushed.lse_dot) *", "0 *"),
        "slopes do not move": Edit("reference.py", "attention_hvp", "+ slope_dot * ds", ""),
    },
    what_all_keys_share_cancels: {
        "the mean is not corrected": Edit(
            "reference.py", "_Pushed.of", "np.isfinite(mean), mean_of(rest, of_sink - mean), 0", "False, mean, 0"
        ),
    },
    overflow_has_no_bound: {
        "a weight of zero hides infinity": Edit(
            BOUNDS, "_sink_second_tolerance", "np.isneginf(operands.logit)", "np.exp(forward.log_p_sink) == 0"
        ),
    },
    results_do_not_overwrite_tangents: {
        "o may be written over a tangent": Edit(
            "calls/tangents.py", "push", "refuse(_overwritten_reasons(out, directions))", "pass"
        ),
    },
    the_specification_refuses_shapes: {
        "arrays of the specification may broadcast": Edit(
            "reference.py", "_alike", "x is not None and np.shape(x) != tuple(shape)", "False"
        ),
        "the specification takes arrays with more axes": Edit(
            "reference.py", "_fitting", "missing < 0 or", "False and"
        ),
        "v of the specification may have other heads": Edit(
            "reference.py", "_refuse_shapes", "of_v not in (1, of_k)", "False"
        ),
    },
    sums_that_overflow_have_no_bound: {
        "scores never overflow": Edit(
            "bounds/forward.py", "_scores", "mass * math.log2(math.e) > model.largest_sum", "False"
        ),
        "o has a bound where weights have none": Edit(
            "bounds/forward.py", "forward_tolerances", "np.isfinite(eta).all(axis=-1, keepdims=True)", "True"
        ),
        "sums never overflow": Edit("bounds/rounding.py", "summable", "error > 2", "0 * error > 2"),
        "sums of a result never overflow": Edit(
            "bounds/rounding.py", "rounded_up", "summable(tolerance, model)", "tolerance"
        ),
        "dP and D never overflow": Edit(
            "bounds/gradients.py", "gap_of", "e_g = summable(", "e_g = (lambda error, _: error)("
        ),
        "dS k is scaled before it is summed": Edit(
            "bounds/gradients.py", "gradient_tolerances",
            "summable(rounded(ds, e_ds, terms[0], model) @ np.abs(operands.keys), model)",
            "rounded(ds, e_ds, terms[0], model) @ np.abs(operands.keys)",
        ),
        "tangents of scores never overflow": Edit(
            "bounds/tangents.py", "_final_tangents", "summable(((model.k(depth) + 4) * ua + model.t) * mass, model)",
            "((model.k(depth) + 4) * ua + model.t) * mass",
        ),
        "tangents of dP and D never overflow": Edit(
            "bounds/tangents.py", "_second_finals", "e_h = summable(", "e_h = (lambda error, _: error)("
        ),
    },
    gradients_read_the_rounded_o: {
        "o that overflows has a finite error": Edit(
            "bounds/gradients.py", "stored_error", "np.where(may_overflow, np.inf, ", "("
        ),
    },
    wrong_tangents_are_refused: {
        "no tangent is one": Edit(RULES, "tangent_reasons", "if not names:", "if False:"),
        "a tangent of any shape is taken": Edit(
            RULES, "_array_reasons", "if actual == shape and array.dtype == dtype:", "if True:"
        ),
        "integers move": Edit(RULES, "real_operands", 'kinds.get(each.name) == "real"', "True"),
        "any name is known": Edit(RULES, "_name_reasons", "if name in known:", "if True:"),
        "q may be named twice": Edit(RULES, "gathered", "if twice:", "if False:"),
    },
}  # fmt: skip
