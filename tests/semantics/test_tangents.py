"""Forward-mode and second derivatives: agreement with the reference, duality, linearity, and the rules of values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuflash.scores.program import derived, gradient_loads, pushed
from cuflash.scores.roundoff import values_and_errors
from cuflash.scores._primitives import Arithmetic
from cuflash.scores.values import Operands
from cuflash.testing import Example, Structure, assert_within
from cuflash.testing.dual import Dual
from cuflash.testing.formulas import Formula, formulas
from cuflash.testing.tangents import Moving, assert_tangents_within_bounds, movings, with_tangents
from executors import is_long, needs_compiler
from foreign import Foreign
from hypothesis import given, settings, strategies as st, target
from test_score_programs import SHAPE, places, some_scores

import cuflash
from cuflash import UnsupportedProblem, masks, reference

SMALL = {"most_scores": 1 << 12, "most_rows": 300, "widest": 40, "longest": 150}
TWO = {"q_batch": (2,), "k_batch": (1,), "v_batch": (2,)}
ROWS = np.arange(40)[:, None] % 3 > 0  # rows with keys; the others have none
FULL = Structure(
    **TWO, num_heads=4, num_kv_heads=2, seqlen_q=40, seqlen_kv=70, value_dim=6, dtype="float64", sink=(4,),
    sink_dtype="float64", mask=masks.Dense(ROWS), dropout=cuflash.Dropout(0.3, seed=5),
)  # fmt: skip
MANY = settings.default.max_examples if is_long() else None  # the number of examples of a long run
MODEL = Arithmetic(2.0**-53, 1e-300, 1e300)
EVERY = dict.fromkeys(("q", "k", "v", "sink", "do", "dlse"), "normal")


def options_of(example: Example) -> dict[str, Any]:
    options = {"mask": example.mask, "scale": example.scale, "score": example.score, "dropout": example.dropout}
    return {name: value for name, value in (options | {"sink": example.sink}).items() if value is not None}


def push(moving: Moving, **options: Any) -> dict[str, np.ndarray]:
    """Return o, lse and their tangents; if no array of the forward pass has a tangent, use zeros."""
    example = moving.example
    given_ = moving.of_call() or {"q_dot": np.zeros_like(example.q)}
    values, dots = cuflash.attention_jvp(
        example.q, example.k, example.v, **given_, **options_of(example), return_lse=True, **options
    )
    return dict(zip(("o", "lse", "o_dot", "lse_dot"), (*values, *dots)))


def second(moving: Moving) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the gradients and their tangents."""
    example = moving.example
    wrt = [*example.wrt, *(["sink"] if example.sink is not None else [])]
    _, *outputs = cuflash.attention_hvp(
        example.q, example.k, example.v, example.do, dlse=example.dlse, **moving.of_call(has_gradients=True),
        **options_of(example), wrt=wrt,
    )  # fmt: skip
    named = [dict(zip(("dq", "dk", "dv"), each)) | {f"d{name}": each[name] for name in wrt} for each in outputs]
    return named[0], named[1]


def drawn_program(formula: Formula, seed: int) -> tuple[Any, Operands, list[str], dict[str, np.ndarray]]:
    """Return the score of a formula, its operands, the names of its real arrays, and their tangents."""
    arrays = formula.arrays(SHAPE, seed, np.float32)
    score = cuflash.scores.Score(formula, **arrays)
    names = [array.name for array in score.program.arrays if array.kind == "real"]
    rng = np.random.default_rng(seed)
    dots = {name: np.asarray(rng.standard_normal(arrays[name].shape)).astype(arrays[name].dtype) for name in names}
    return score, Operands(score.numbers, tuple(arrays.values()), SHAPE.batch), names, dots


def inner(first: np.ndarray, other: np.ndarray) -> float:
    return float(np.sum(first.astype(np.float64) * other.astype(np.float64)))


def same(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert first.keys() == other.keys()
    for name, x in first.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


# The specification


def test_the_reference_is_the_complex_step_of_the_forward_pass() -> None:
    moving = with_tangents(FULL.example(), EVERY)
    example, step = moving.example, 1e-20j
    dots = moving.tangents
    fixed = {"mask": example.dense_mask, "weight_factors": example.weight_factors}
    arrays = {name: getattr(example, name) + step * dots[name] for name in ("q", "k", "v", "sink")}
    o, lse = reference.attention(**arrays, **fixed)
    has_lse = np.isfinite(lse.real)
    fixed |= {"sink": example.sink, "sink_dot": dots["sink"]}
    outputs, lse_dot = reference.attention_jvp(
        example.q, example.k, example.v, dots["q"], dots["k"], dots["v"], **fixed
    )
    np.testing.assert_allclose(outputs, o.imag / 1e-20, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse_dot[has_lse], (lse.imag / 1e-20)[has_lse], rtol=0, atol=1e-13)


def test_the_reference_is_the_central_difference_of_gradients() -> None:
    """With long doubles, eleven digits of a difference are accurate."""
    moving = with_tangents(FULL.example(), EVERY)
    example, step = moving.example, np.longdouble(2.0**-22)
    names = ("q", "k", "v", "do", "dlse", "sink")
    wide = {name: getattr(example, name).astype(np.longdouble) for name in names}
    dots = {f"{name}_dot": moving.tangents[name].astype(np.longdouble) for name in names}
    fixed = {"mask": example.dense_mask, "weight_factors": example.weight_factors}
    ends = [
        reference.attention_vjp(**{name: x + sign * step * dots[f"{name}_dot"] for name, x in wide.items()}, **fixed)
        for sign in (1, -1)
    ]
    for outputs, plus, minus in zip(reference.attention_hvp(**wide, **dots, **fixed), *ends, strict=True):
        slope = (plus - minus) / (2 * step)
        assert_within("tangent", outputs, slope, 1e-10 * float(np.abs(slope).max()))


# Agreement within bounds


@settings(max_examples=MANY or 25)
@given(movings(**SMALL, has_sink=True, has_dropout=True))
def test_tangents_are_within_their_bounds(moving: Moving) -> None:
    outputs, (_, dots) = push(moving), second(moving)
    named = {name: outputs[name] for name in ("o_dot", "lse_dot")} | {f"{name}_dot": x for name, x in dots.items()}
    target(assert_tangents_within_bounds(moving, **named))
    example = moving.example
    o, lse = cuflash.attention(example.q, example.k, example.v, **options_of(example), return_lse=True)
    same({"o": o, "lse": lse}, {name: outputs[name] for name in ("o", "lse")})


@settings(max_examples=MANY or 15)
@given(movings(**SMALL | {"most_scores": 1 << 11}, has_score=True))
def test_tangents_of_score_functions_are_within_their_bounds(moving: Moving) -> None:
    outputs, (_, dots) = push(moving), second(moving)
    named = {name: outputs[name] for name in ("o_dot", "lse_dot")}
    named |= {f"{name}_dot": dots[name] for name in ("dq", "dk", "dv")}
    assert_tangents_within_bounds(moving, **named)


def curved(s, b, h, i, j, temperature, slope):
    return temperature[h] * 3 * np.tanh(s / 3) - slope[h] * np.abs(i - j)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_tangents_of_the_gradients_of_arrays_are_differences_of_these(dtype: str) -> None:
    """The example has every feature at once."""
    example = replace(FULL, dtype=dtype, sink_dtype="float32").example()
    rng = np.random.default_rng(0)
    arrays = {"temperature": 1 + 0.3 * rng.standard_normal(4), "slope": 0.1 * rng.standard_normal(4)}
    arrays["bias"] = rng.standard_normal((4, 40, 70))
    bias, score = arrays.pop("bias"), cuflash.scores.Score(curved, **arrays)
    names = ("temperature", "slope", "bias", "sink")
    moved_arrays = arrays | {"bias": bias, "sink": example.sink}
    dots = {name: rng.standard_normal(x.shape) for name, x in moved_arrays.items()}
    dots["sink"] = dots["sink"].astype(np.float32)
    own = with_tangents(example, dict.fromkeys(("q", "k", "v", "do", "dlse"), "normal"))
    fixed = {"mask": example.mask, "dropout": example.dropout, "wrt": names}

    def gradients(step: float) -> list[np.ndarray]:
        wide = {name: x.astype(np.float64) for name, x in own.tangents.items()}
        q, k, v, do, dlse = (getattr(example, name).astype(np.float64) + step * wide[name] for name in wide)
        moved = cuflash.scores.Score(curved, **{name: x + step * dots[name] for name, x in arrays.items()})
        sink = example.sink.astype(np.float64) + step * dots["sink"]
        call = {**fixed, "score": moved, "bias": bias + step * dots["bias"], "sink": sink}
        (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **call)
        outputs = vjp(do, dlse)
        return [*outputs, *(outputs[name] for name in names)]

    # A fourth-order difference has an error of about step^4 of the numbers, plus their rounding divided by the step.
    step = 2.0**-12
    near, far = ([plus - minus for plus, minus in zip(gradients(by), gradients(-by))] for by in (step, 2 * step))
    exact = [(8 * once - twice) / (12 * step) for once, twice in zip(near, far, strict=True)]
    call = {**fixed, "score": score, "bias": bias, "sink": example.sink}
    _, _, outputs = cuflash.attention_hvp(
        example.q, example.k, example.v, example.do, dlse=example.dlse, **own.of_call(has_gradients=True),
        tangents=dots, **call,
    )  # fmt: skip
    bounds = cuflash.error_bound(
        example.q, example.k, example.v, example.do, dlse=example.dlse, tangents={**own.tangents, **dots}, **call
    )
    of_others = {**bounds.others_dot, "sink": bounds.dsink_dot}
    every = [bounds.dq_dot, bounds.dk_dot, bounds.dv_dot, *(of_others[name] for name in names)]
    gradients_dot = *outputs, *map(outputs.__getitem__, names)
    for name, got, wanted, bound in zip(("q", "k", "v", *names), gradients_dot, exact, every):
        difference = 2.0**-30 * float(np.abs(wanted).max())
        assert_within(name, got.astype(np.float64), wanted, bound + difference)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_drift_that_all_keys_share_costs_no_digits(dtype: str) -> None:
    """Tangents of scores are relative to a number of their row; else their common drift would multiply o's rounding."""
    example = Structure(num_heads=2, seqlen_q=60, seqlen_kv=700, head_dim=16, dtype=dtype).example()
    moving = with_tangents(example, {"k": "drift"})
    outputs = push(moving)
    assert_tangents_within_bounds(moving, o_dot=outputs["o_dot"], lse_dot=outputs["lse_dot"])
    drift = np.abs(moving.exact.lse_dot).max() * np.finfo(np.float16).eps * np.abs(moving.example.exact.o).max()
    assert moving.bounds.o_dot.max() < drift / 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_tangent_that_all_keys_share_moves_lse_alone(dtype: str) -> None:
    """The specification subtracts it without rounding; otherwise, its error exceeds the bound on results."""
    formula = Formula(("load", "tau"))
    example = Structure(seqlen_q=60, seqlen_kv=60, dtype=dtype, values="lattice", score=formula).example()
    shared = with_tangents(example, {"tau": "normal"})
    outputs = push(shared)
    assert_tangents_within_bounds(shared, o_dot=outputs["o_dot"], lse_dot=outputs["lse_dot"])
    assert np.abs(shared.exact.o_dot).max() <= 2.0**-100


def test_a_weight_of_zero_does_not_hide_an_output_tangent_that_overflows() -> None:
    """The sink's weight underflows, and o_dot exceeds float16: the tangent of the sink's gradient has no bound."""
    q, k, v = (np.array(x, np.float16)[None] for x in ([[1]], [[1], [1]], [[100], [-100]]))
    example = Example(q=q, k=k, v=v, do=np.ones((1, 1, 1), np.float16), scale=1e4, sink=np.zeros(1, np.float16))
    moving = Moving(example, {"k": np.array([[[1], [-1]]], np.float16)})
    assert np.isinf(push(moving)["o_dot"]).all() and np.isnan(second(moving)[1]["dsink"]).all()
    assert np.isinf(moving.bounds.dsink_dot).all() and moving.exact.dsink_dot == 0


# Properties


@settings(max_examples=MANY or 15)
@given(movings(**SMALL, dtypes=["float32", "float64"], has_sink=True))
def test_pushing_forward_is_dual_to_pulling_back(moving: Moving) -> None:
    example, outputs = moving.example, push(moving)
    options = options_of(example)
    wrt = ("sink",)
    o, vjp = cuflash.attention_vjp(example.q, example.k, example.v, **options, wrt=wrt)
    gradients = vjp(example.do, example.dlse)
    pulled = {"q": gradients.dq, "k": gradients.dk, "v": gradients.dv, "sink": gradients["sink"]}
    of_pulled = {name: getattr(example.bounds, f"d{name}") for name in pulled}
    forward = inner(example.do, outputs["o_dot"])
    off = float(np.sum(np.abs(example.do) * moving.bounds.o_dot))
    size = inner(np.abs(example.do), np.abs(outputs["o_dot"]))
    if example.dlse is not None:
        forward += inner(example.dlse, outputs["lse_dot"])
        off += float(np.sum(np.abs(example.dlse) * moving.bounds.lse_dot))
        size += inner(np.abs(example.dlse), np.abs(outputs["lse_dot"]))
    backward = 0.0
    for name, gradient in pulled.items():
        if name in moving.tangents:
            tangent = moving.tangents[name]
            backward += inner(gradient, tangent)
            off += float(np.sum(np.abs(tangent) * of_pulled[name]))
            size += inner(np.abs(gradient), np.abs(tangent))
    assert_within("<do, jvp>", np.array(forward), np.array(backward), 2 * off + 1e-12 * size, moving)


@settings(max_examples=MANY or 8)
@given(movings(**SMALL, dtypes=["float32", "float64"], has_sink=True))
def test_the_hessian_is_symmetric(moving: Moving) -> None:
    names = ("q", "k", "v", "sink")
    first = with_tangents(moving.example, dict.fromkeys(names, "normal"), seed=1)
    other = with_tangents(moving.example, {name: kind for name, kind in zip(names, ("lattice", "normal") * 2)}, seed=2)
    products, off, size = [], 0.0, 0.0
    for one, two in ((first, other), (other, first)):
        _, dots = second(one)
        products.append(sum(inner(dots[f"d{name}"], two.tangents[name]) for name in names))
        for name in names:
            bound, tangent = getattr(one.bounds, f"d{name}_dot"), np.abs(two.tangents[name])
            off += float(np.sum(bound * tangent))
            size += inner(np.abs(dots[f"d{name}"]), tangent)
    assert_within("<h, H g>", np.array(products[0]), np.array(products[1]), off + 1e-12 * size, moving)


@settings(max_examples=MANY or 12)
@given(movings(**SMALL, dtypes=["float32", "float64"], has_sink=True, has_dropout=True))
def test_powers_of_two_come_through_exactly(moving: Moving) -> None:
    for results in (push, lambda each: second(each)[1]):
        once, scaled = results(moving), results(moving.scaled(2.0**-4))
        for name in once.keys() - {"o", "lse"}:
            is_normal = np.abs(once[name]) > 1e-25  # far above any loss to underflow in a sum
            np.testing.assert_array_equal(scaled[name][is_normal], 2.0**-4 * once[name][is_normal], err_msg=name)


@settings(max_examples=MANY or 15)
@given(movings(**SMALL, has_sink=True, has_score=True))
def test_tangents_of_zero_give_zeros(moving: Moving) -> None:
    still = Moving(moving.example, {name: np.zeros_like(x) for name, x in moving.tangents.items()})
    is_finite = all(np.isfinite(x).all() for x in second(still)[0].values())
    if is_finite and np.isfinite(push(still)["o"]).all():
        outputs, (_, dots) = push(still), second(still)
        for x in (outputs["o_dot"], outputs["lse_dot"], *dots.values()):
            assert not x[~np.isnan(x)].any()  # an infinite slope times 0 is NaN


@settings(max_examples=MANY or 12)
@given(movings(**SMALL, has_sink=True, has_dropout=True))
def test_an_absent_tangent_is_one_of_zeros(moving: Moving) -> None:
    names = ("q", "k", "v", "sink", "do", "dlse")
    arrays = {name: getattr(moving.example, name) for name in names}
    zeros = {name: np.zeros_like(x) for name, x in arrays.items() if x is not None}
    full = Moving(moving.example, zeros | dict(moving.tangents))
    same(push(moving), push(full))
    same(second(moving)[1], second(full)[1])


def test_absent_blocks_do_not_matter() -> None:
    """Tangents of keys in absent blocks, and of keys past a length, may be NaN."""
    blocks = masks.BlockPattern(np.array([[1, 0], [1, 0]], bool), (64, 512))
    for mask, seen in ((blocks, 512), (masks.Lengths(kv=600), 600)):
        example = Structure(num_heads=2, seqlen_q=128, seqlen_kv=1024, head_dim=4, mask=mask).example()
        moving = with_tangents(example, dict.fromkeys(("q", "k", "v"), "normal"))
        poisoned = {name: x.copy() for name, x in moving.tangents.items()}
        for name in "kv":
            poisoned[name][:, seen:] = np.nan
        first, other = push(moving), push(Moving(example, poisoned))
        same(first, other)
        for name, x in second(Moving(example, poisoned))[1].items():
            part = x if name == "dq" else x[:, :seen]
            assert np.isfinite(part).all(), name


def test_rows_without_a_key_have_tangents_of_zero() -> None:
    example = replace(FULL, dropout=None, dtype="float32", sink_dtype="float32").example()
    without = with_tangents(example.but(sink=None), {"q": "normal", "v": "normal"})
    for moving in (with_tangents(example, EVERY), without):
        outputs = push(moving)
        assert not outputs["o_dot"][..., ::3, :].any()
        sink_dot = moving.tangents.get("sink", np.zeros(4, np.float32))
        wanted = np.broadcast_to(sink_dot[:, None], (2, 4, 14))
        np.testing.assert_array_equal(outputs["lse_dot"][..., ::3], wanted)
        assert not second(moving)[1]["dq"][..., ::3, :].any()


def test_a_call_without_keys_has_tangents_of_zero() -> None:
    for seqlen_kv, mask in ((0, None), (7, masks.Dense(np.zeros((5, 1), bool)))):
        example = Structure(num_heads=2, seqlen_q=5, seqlen_kv=seqlen_kv, sink=(2,), mask=mask).example()
        moving = with_tangents(example, EVERY)
        outputs, (_, dots) = push(moving), second(moving)
        assert not outputs["o_dot"].any() and not any(dots[name].any() for name in ("dq", "dk", "dv"))
        np.testing.assert_array_equal(outputs["lse_dot"], np.repeat(moving.tangents["sink"][:, None], 5, axis=1))
        np.testing.assert_allclose(dots["dsink"], moving.tangents["dlse"].sum(axis=-1), rtol=1e-6)


def test_a_row_whose_scores_are_all_minus_infinity_does_not_move() -> None:
    x, q = np.ones((2, 3), np.float32), np.array([[-np.inf, 1, 1], [1, 1, 1]], np.float32)
    (o, lse), (o_dot, lse_dot) = cuflash.attention_jvp(q, x, x, x, x, return_lse=True)
    assert np.isneginf(lse[0]) and not o_dot[0].any() and lse_dot[0] == 0 and np.isfinite(lse_dot[1])


def test_nan_and_infinities_reach_what_they_should() -> None:
    q = k = v = np.ones((3, 4), np.float32)
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
    moved = np.zeros_like(q)
    moved[1] = np.nan
    for name in ("q_dot", "k_dot", "v_dot"):
        (_, lse), (o_dot, lse_dot) = cuflash.attention_jvp(q, k, v, **{name: moved}, mask=mask, return_lse=True)
        rows = [1] if name == "q_dot" else [1, 2]
        assert np.isnan(o_dot[rows]).all(), name
        assert not np.isnan(np.delete(lse_dot, rows)).any()
        assert np.isnan(lse_dot[rows]).all() == (name != "v_dot")
    sink, still = np.array([np.nan], np.float32), np.zeros_like(q)
    (_, lse), (o_dot, lse_dot) = cuflash.attention_jvp(q, k, v, still, sink=sink, return_lse=True)
    assert np.isnan(lse).all() and np.isnan(o_dot).all() and np.isnan(lse_dot).all()
    infinite = np.array([-np.inf], np.float32)
    o_dot = cuflash.attention_jvp(q, k, v, tangents={"sink": -infinite}, sink=infinite)[1]
    assert not o_dot.any()
    hidden = np.where(np.eye(3) > 0, 0, -np.inf)
    o_dot = cuflash.attention_jvp(q, k, v, q, bias=hidden, tangents={"bias": np.where(hidden == 0, 1, np.nan)})[1]
    assert np.isfinite(o_dot).all()


def test_keys_that_all_move_alike_leave_the_output() -> None:
    example = Structure(num_heads=2, seqlen_q=30, seqlen_kv=50, dtype="float32").example()
    moving = Moving(example, {"k": np.broadcast_to(example.k[:, :1], example.k.shape)})
    outputs = push(moving)
    assert_within("o_dot", outputs["o_dot"], np.zeros(outputs["o_dot"].shape), moving.bounds.o_dot)
    shift = example.problem.softmax_scale * (example.q.astype(np.float64) @ example.k[:, :1].swapaxes(-1, -2))[..., 0]
    assert_within("lse_dot", outputs["lse_dot"], shift, moving.bounds.lse_dot)


def test_values_that_all_move_alike_move_the_output_so() -> None:
    example = Structure(num_heads=2, seqlen_q=30, seqlen_kv=50, dtype="float32").example()
    moving = Moving(example, {"v": np.ones_like(example.v)})
    assert_within("o_dot", push(moving)["o_dot"], np.ones(example.q.shape), moving.bounds.o_dot)


def test_grouped_heads_are_repeated_ones() -> None:
    moving = with_tangents(replace(FULL, dropout=None).example(), EVERY)
    example = moving.example
    repeated = {name: np.repeat(getattr(example, name), 2, axis=-3) for name in "kv"}
    dots = {name: np.repeat(x, 2, axis=-3) if name in "kv" else x for name, x in moving.tangents.items()}
    other = Moving(example.but(**repeated), dots)
    same(push(moving), push(other))
    for name, x in second(other)[1].items():
        ours = second(moving)[1][name]
        folded = x.reshape(*x.shape[:-3], 2, 2, *x.shape[-2:]).sum(axis=-3) if name in ("dk", "dv") else x
        np.testing.assert_allclose(ours, folded, rtol=1e-10, atol=1e-12, err_msg=name)


def test_packed_sequences_are_one_call_each() -> None:
    offsets = np.array([0, 30, 31, 90])
    example = Structure(num_heads=2, seqlen_q=90, seqlen_kv=90, dtype="float64").example()
    packed = example.but(mask=masks.Sequences(offsets, causal=True))
    moving = with_tangents(packed, dict.fromkeys(("q", "k", "v", "do"), "normal"))
    outputs, (_, dots) = push(moving), second(moving)
    for start, stop in zip(offsets, offsets[1:]):
        part = {name: getattr(example, name)[:, start:stop] for name in ("q", "k", "v", "do", "dlse")}
        cut = Example(**part, mask=masks.Causal())
        one = Moving(cut, {name: x[:, start:stop] for name, x in moving.tangents.items()})
        alone, (_, alone_dots) = push(one), second(one)
        for name, x in (alone | alone_dots).items():
            np.testing.assert_allclose((outputs | dots)[name][:, start:stop], x, rtol=1e-9, atol=1e-12, err_msg=name)


def test_listed_blocks_are_their_dense_mask() -> None:
    blocks = masks.BlockPattern(np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0]], bool), (64, 64))
    example = Structure(num_heads=4, num_kv_heads=2, seqlen_q=130, seqlen_kv=192, mask=blocks).example()
    moving = with_tangents(example, dict.fromkeys(("q", "k", "v", "do"), "normal"))
    other = Moving(example.but(mask=example.dense_mask), moving.tangents)
    for results in (push, lambda each: second(each)[1]):
        outputs = results(other)
        for name, x in results(moving).items():
            bound = getattr(moving.bounds, name if name in ("o", "lse", "o_dot", "lse_dot") else f"{name}_dot")
            assert_within(name, x, outputs[name], 2 * bound)


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    """Merge the parts moved by plus and minus a step; the central difference is the tangent of the whole."""
    example = Structure(num_heads=2, seqlen_q=20, seqlen_kv=60, dtype="float64").example()
    moving = with_tangents(example, dict.fromkeys(("q", "k", "v"), "normal"))
    parts = []
    for keys in (slice(0, 25), slice(25, 60)):
        dots = {name: x if name == "q" else x[:, keys] for name, x in moving.tangents.items()}
        parts.append(push(Moving(example.but(k=example.k[:, keys], v=example.v[:, keys]), dots)))
    step = 2.0**-18
    ends = [
        cuflash.merge(*([part[name] + sign * step * part[f"{name}_dot"] for part in parts] for name in ("o", "lse")))
        for sign in (1, -1)
    ]
    whole = push(moving)
    for name, plus, minus in zip(("o_dot", "lse_dot"), *ends):
        np.testing.assert_allclose((plus - minus) / (2 * step), whole[name], rtol=1e-8, atol=1e-9)


def test_rows_of_several_steps_have_one_center() -> None:
    """A row's center comes from its first step, even while another row waits for its first key."""
    example = Structure(seqlen_q=9, seqlen_kv=40000, head_dim=4, value_dim=2, mask=masks.Lengths(q=8)).example()
    own = with_tangents(example, {"q": "normal", "v": "normal", "do": "normal"}).tangents
    later = np.where(np.arange(40000)[:, None] < 20000, 0 * example.k, np.float32(4))
    moving = Moving(example, {**own, "k": later})
    outputs, (_, dots) = push(moving), second(moving)
    named = {name: outputs[name] for name in ("o_dot", "lse_dot")} | {f"{name}_dot": x for name, x in dots.items()}
    assert_tangents_within_bounds(moving, **named)


# Score programs


@settings(max_examples=MANY or 60)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_a_pushed_program_gives_what_dual_numbers_give(formula: Formula, seed: int) -> None:
    score, operands, names, dots = drawn_program(formula, seed)
    s, at = some_scores(seed), places()
    s_dot = some_scores(seed + 1)
    program = pushed(score.program, names)
    moved = operands._replace(arrays=[*operands.arrays, *(dots[name] for name in names)])
    (value, _), (tangent, error) = values_and_errors(program, moved, s, 0.0, *at.values(), MODEL, s_dot, 0.0)
    wide = {name: x.astype(np.longdouble) if x.dtype.kind in "fV" else x for name, x in score.arrays.items()}
    given_ = {name: Elements(x, dots[name].astype(np.longdouble)) if name in names else x for name, x in wide.items()}
    given_ = {name: x[()] if isinstance(x, Elements) and not x.value.ndim else x for name, x in given_.items()}
    with np.errstate(all="ignore"):
        outputs = formula(Dual(s.astype(np.longdouble), {"t": s_dot.astype(np.longdouble)}), **at, **given_)
    exact = outputs.tangents.get("t", 0.0) if isinstance(outputs, Dual) else 0.0
    off = np.abs(tangent - exact)
    is_right = (off <= 2 * error) | (np.isnan(tangent) & np.isnan(exact)) | (tangent == exact)
    assert is_right.all(), score


@settings(max_examples=MANY or 60)
@given(formula=formulas(), seed=st.integers(0, 2**32 - 1))
def test_second_derivatives_of_a_program_commute(formula: Formula, seed: int) -> None:
    """The slope's tangent along an array equals the tangent along the score of the derivative by that array."""
    score, operands, names, _ = drawn_program(formula, seed)
    s, at = some_scores(seed), places()
    for name in names:
        if not gradient_loads(score.program, [name]):
            continue
        array = operands.arrays[list(score.arrays).index(name)]
        along_array = pushed(derived(score.program), [name], moves_score=False)
        ones = operands._replace(arrays=[*operands.arrays, np.ones_like(array)])
        along_score = pushed(derived(score.program, (name,)))
        first, e_first = values_and_errors(along_array, ones, s, 0.0, *at.values(), MODEL)[3]
        other, e_other = values_and_errors(along_score, operands, s, 0.0, *at.values(), MODEL, np.ones_like(s), 0.0)[5]
        is_right = (np.abs(first - other) <= 2 * (e_first + e_other)) | (first == other)
        assert (is_right | np.isnan(first) | np.isnan(other)).all(), score


class Elements:
    """An array with dual numbers as elements."""

    def __init__(self, value: np.ndarray, tangent: np.ndarray) -> None:
        self.value, self.tangent = value, tangent

    def __getitem__(self, index: Any) -> Dual:
        return Dual(self.value[index], {"t": self.tangent[index]})


# Wrong tangents

X = np.ones((2, 3, 4), np.float32)
IDS = cuflash.scores.Score(lambda s, b, h, i, j, ids: s + ids[j], ids=np.arange(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "attention_jvp needs at least one tangent; got none: pass q_dot=, k_dot=, v_dot= or tangents=, or call"),
        ({"q_dot": X[0]}, r"q_dot must have q's shape \(2, 3, 4\) and dtype float32; got \(3, 4\) and float32: np"),
        ({"k_dot": X.astype(float)}, r"k_dot must have k's shape .*: cast it to float32"),
        ({"tangents": {"ids": X}, "score": IDS}, "tangents must name real arrays; got 'ids', which holds int64"),
        ({"tangents": {"slope": X}}, "tangents must name arrays of this call, which are 'q', .*; got 'slope'"),
        ({"tangents": {"q": X}}, "tangents must not name 'q': pass q_dot="),
        ({"tangents": {"q_dot": X}}, "'q_dot', the tangent of a tangent, .* third derivatives .* finite differences"),
        ({"tangents": X}, "tangents must be a dict of arrays by name, or None; got .*: write tangents="),
        ({"tangents": {1: X}}, "tangents must name arrays of this call, which are 'q', .*; got 1$"),
        ({"q_dot": X, "executor": "sim", "kernel": "naive"}, "kernel='naive' does not support tangents; got some: use"),
        ({"tangents": {"sink": np.ones(1)}, "sink": np.ones(2, np.float32)}, r"tangents\['sink'\] must have sink's"),
        ({"q_dot": X[:, :1, :2]}, r"q_dot must have q's shape .*; got \(2, 1, 2\) and float32$"),
    ],
)  # fmt: skip
def test_a_wrong_tangent_is_refused(options: dict[str, Any], message: str) -> None:
    cuflash.attention_jvp(X, X, X, X)
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match=message):
            cuflash.attention_jvp(X, X, X, **options)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        cuflash.attention_hvp(X, X, X, X[0], X[0], tangents={"bias": X}, wrt="sink", causal="left", do_dot=X[1])
    assert len(caught.value.reasons) == 6


def test_what_is_no_array_is_no_tangent() -> None:
    with pytest.raises(TypeError, match="q_dot must be an array"):
        cuflash.attention_jvp(X, X, X, 3)
    with pytest.raises(TypeError, match="do must be an array"):
        cuflash.attention_hvp(X, X, X, None, X)
    eights = [cuflash.quantize(X)] * 3
    with pytest.raises(UnsupportedProblem, match="Quantized here, because FP8 has neither gradients nor plans"):
        cuflash.attention_jvp(*eights, X)


def test_a_plan_refuses_what_a_call_refuses() -> None:
    ready = cuflash.plan(X, X, X)
    o, lse = ready.forward(X, X, X)
    with pytest.raises(UnsupportedProblem, match="Plan.jvp needs at least one tangent"):
        ready.jvp(X, X, X, o, lse)
    with pytest.raises(UnsupportedProblem, match="q_dot must have q's shape"):
        ready.jvp(X, X, X, o, lse, X[0])
    with pytest.raises(UnsupportedProblem, match="tangents must name arrays of this call"):
        ready.jvp(X, X, X, o, lse, tangents={"bias": X})
    with pytest.raises(UnsupportedProblem, match="lse_dot must have shape"):
        ready.backward_jvp(o, X, X, X, o, lse, o, lse[0], X)
    with pytest.raises(UnsupportedProblem, match="got 'dlse': pass dlse_dot= together with dlse="):
        ready.backward_jvp(o, X, X, X, o, lse, o, lse, X, dlse_dot=lse)
    with pytest.raises(UnsupportedProblem, match="tangents must be a name, or a tuple or list of names; got an array"):
        cuflash.plan(X, X, X, tangents=X)
    for names in ("do", "bias", ("q", "o_dot")):
        with pytest.raises(UnsupportedProblem, match="tangents must (not )?name"):
            cuflash.plan(X, X, X, tangents=names)
    with pytest.raises(UnsupportedProblem, match="tangents must be a name, or a tuple or list of names; got 3"):
        cuflash.plan(X, X, X, tangents=3)
    with pytest.raises(UnsupportedProblem, match="kernel='naive' does not support tangents"):
        cuflash.plan(X, X, X, tangents="q", kernel="naive", device=cuflash.DeviceSpec.gpu("H100"))
    simulated = cuflash.plan(X, X, X, executor="sim", kernel="naive")
    with pytest.raises(UnsupportedProblem, match="kernel='naive' does not support tangents"):
        simulated.jvp(X, X, X, o, lse, X)


def test_out_is_written_by_the_call() -> None:
    out = np.empty_like(X), np.empty((2, 3), np.float32)
    (o, lse), _ = cuflash.attention_jvp(X, X, X, X, out=out, return_lse=True)
    assert o is out[0] and lse is out[1]


@pytest.mark.parametrize("executor", ["cpu", pytest.param("sim", marks=needs_compiler)])
def test_results_do_not_overwrite_tangents(executor: str) -> None:
    """The pass "jvp" reads tangents after o has been written."""
    tangent, bias = X.copy(), np.ones((2, 3, 3), np.float32)
    memory = np.ones(X.size + bias.size, np.float32)
    bias_dot = memory[:bias.size].reshape(bias.shape)
    cases = [({}, tangent, "out must not overlap q_dot"), ({}, tangent[::-1], "out must not overlap q_dot")]
    cases += [({"bias": bias}, memory[1 : X.size + 1].reshape(X.shape), r"out must not overlap tangents\['bias'\]")]
    for options, out, message in cases:
        dots = {"tangents": {"bias": bias_dot}} if options else {}
        for is_foreign in (False, False, True):
            q_dot = Foreign(tangent) if is_foreign else tangent
            with pytest.raises(UnsupportedProblem, match=message):
                cuflash.attention_jvp(X, X, X, q_dot, out=out, executor=executor, **options, **dots)
    assert (tangent == 1).all() and (memory == 1).all()
    cuflash.attention_jvp(X, X, X, tangent, out=np.empty_like(X), executor=executor)
    with pytest.raises(UnsupportedProblem, match="out must not overlap q_dot"):  # also in a repeated call
        cuflash.attention_jvp(X, X, X, tangent, out=tangent, executor=executor)


# Plans


def test_a_plan_has_both_passes() -> None:
    moving = with_tangents(replace(FULL, dropout=None).example(), EVERY)
    example, dots = moving.example, moving.tangents
    arrays = example.q, example.k, example.v
    ready = cuflash.plan(*arrays, mask=example.mask, sink=example.sink, wrt="sink", tangents=("q", "k", "v", "sink"))
    assert "tangents   of q, k, v, sink: the passes jvp and backward_jvp" in ready.explain()
    plain = cuflash.plan(*arrays, mask=example.mask, sink=example.sink, wrt="sink")
    assert ready.workspace_bytes > plain.workspace_bytes and "tangents" not in plain.explain()
    for each in (ready, plain):
        o, lse = each.forward(*arrays, sink=example.sink)
        own = {"q_dot": dots["q"], "k_dot": dots["k"], "v_dot": dots["v"], "tangents": {"sink": dots["sink"]}}
        o_dot, lse_dot = each.jvp(*arrays, o, lse, **own, sink=example.sink)
        same({"o_dot": o_dot, "lse_dot": lse_dot}, {name: push(moving)[name] for name in ("o_dot", "lse_dot")})
        outputs = each.backward_jvp(
            example.do, *arrays, o, lse, o_dot, lse_dot, **own, do_dot=dots["do"], dlse=example.dlse,
            dlse_dot=dots["dlse"], sink=example.sink,
        )  # fmt: skip
        expected = {name: second(moving)[1][name] for name in ("dq", "dk", "dsink")}
        same({"dq": outputs.dq, "dk": outputs.dk, "dsink": outputs["sink"]}, expected)


def test_double_backward_and_reverse_over_forward_are_passes_of_a_plan() -> None:
    """The identities with which frameworks differentiate twice are compared with differences of inner products."""
    moving = with_tangents(replace(FULL, dropout=None, sink=None).example(), dict.fromkeys(("q", "k", "v"), "normal"))
    example, dots = moving.example, [moving.tangents[name] for name in "qkv"]
    arrays, options = (example.q, example.k, example.v), {"mask": example.mask}
    along = with_tangents(example, dict.fromkeys(("q", "k", "v", "do"), "normal"), seed=7).tangents
    ready = cuflash.plan(*arrays, **options)
    o, lse = ready.forward(*arrays)
    o_dot, lse_dot = ready.jvp(*arrays, o, lse, *dots)
    second_order = ready.backward_jvp(example.do, *arrays, o, lse, o_dot, lse_dot, *dots)
    mine = inner(o_dot, along["do"]) + sum(inner(each, along[name]) for each, name in zip(second_order, "qkv"))
    step = 2.0**-18

    def products(sign: int) -> float:
        moved = [x + sign * step * along[name] for x, name in zip(arrays, "qkv")]
        _, vjp = cuflash.attention_vjp(*moved, **options)
        return sum(inner(each, dot) for each, dot in zip(vjp(example.do + sign * step * along["do"]), dots))

    assert abs((products(1) - products(-1)) / (2 * step) / mine - 1) < 1e-7

    w, u = example.do, along["do"]
    of_primals = ready.backward_jvp(u, *arrays, o, lse, o_dot, lse_dot, *dots, do_dot=w)
    of_tangents = ready.backward(u, *arrays, o, lse)
    toward = with_tangents(example, dict.fromkeys("qkv", "normal"), seed=8).tangents
    pairs = zip(of_primals, of_tangents, "qkv")
    mine = sum(inner(one, along[name]) + inner(two, toward[name]) for one, two, name in pairs)

    def losses(sign: int) -> float:
        moved = [x + sign * step * along[name] for x, name in zip(arrays, "qkv")]
        turned = [x + sign * step * toward[name] for x, name in zip(dots, "qkv")]
        o, o_dot = cuflash.attention_jvp(*moved, *turned, **options)
        return inner(w, o) + inner(u, o_dot)

    assert abs((losses(1) - losses(-1)) / (2 * step) / mine - 1) < 1e-7


def test_far_scales_and_lists_are_taken() -> None:
    rng = np.random.default_rng(0)
    q, k, v, q_dot, k_dot = rng.standard_normal((5, 2, 6, 4), np.float32)
    plain = cuflash.attention_hvp(q, k, v, v, q_dot, k_dot, scale=0.25)
    big, small = np.float32(1e20), np.float32(2e19)
    far = cuflash.attention_hvp(q * big, k * small, v, v, q_dot * big, k_dot * small, scale=0.25 / (1e20 * 2e19))
    np.testing.assert_allclose(far[0], plain[0], rtol=1e-4)
    np.testing.assert_allclose(far[2].dq * big, plain[2].dq, rtol=2e-3, atol=1e-5)
    listed = cuflash.attention_jvp(q.tolist(), k, v, q_dot.tolist(), k_dot, scale=0.25)
    np.testing.assert_array_equal(listed[1], cuflash.attention_jvp(q, k, v, q_dot, k_dot, scale=0.25)[1])
    ready = cuflash.plan(q, k, v)
    o, lse = ready.forward(q, k, v)
    np.testing.assert_array_equal(ready.jvp(q, k, v, o, lse, q_dot.tolist())[0], ready.jvp(q, k, v, o, lse, q_dot)[0])
