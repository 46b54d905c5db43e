"""error_bound holds, is as small as its derivation says, and is infinite where the library guarantees nothing."""

import math

import faulty_attention
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, target

import cuflash
from cuflash import Dropout, masks
from cuflash.bounds import error_bound
from cuflash.testing import Example, Structure, assert_within_bounds, examples

RESULTS = ("o", "lse", "dq", "dk", "dv")
GAUSSIAN = Structure(num_heads=2, seqlen_q=200, seqlen_kv=200, head_dim=64, value_dim=64, mask=masks.Causal())


@given(examples())
def test_the_exact_answer_rounded_once_is_within_the_bound(example):
    with np.errstate(over="ignore"):
        rounded = {name: getattr(example.exact, name).astype(example.q.dtype) for name in ("o", "dq", "dk", "dv")}
        lse = example.exact.lse.astype(example.problem.accumulator)
    assert_within_bounds(example, **rounded, lse=lse)


@given(examples(most_scores=1 << 14).filter(faulty_attention.can_serve))
def test_a_kernel_that_rounds_p_to_the_storage_dtype_is_within_the_bound(example):
    example = example.but(product_dtype=example.q.dtype)
    options = {"mask": example.dense_mask, "scale": example.problem.softmax_scale}
    o, lse = faulty_attention.attend(example.q, example.k, example.v, **options)
    gradients = faulty_attention.pull(example.q, example.k, example.v, example.do, dlse=example.dlse, **options)
    target(assert_within_bounds(example, o=o, lse=lse, **dict(zip(("dq", "dk", "dv"), gradients))))


def test_a_weight_of_all_keys_that_underflows_next_to_a_sink_is_within_the_bound():
    x = np.zeros((1, 1, 2), np.float32)
    example = Example(q=x, k=x, v=x + 300, sink=np.float32([90]))  # exp(-90) is below the smallest normal number
    assert 1e-37 < example.exact.o.min()
    assert_within_bounds(example, o=x)


def test_products_that_underflow_before_they_are_scaled_for_dropout_are_within_the_bound():
    q, k = np.ones((1, 1, 1), np.float32), np.array([[[0], [-3]]], np.float32)
    seeds = (Dropout(1 - 1 / 256, seed=seed) for seed in range(1 << 12))
    drops_first = next(each for each in seeds if each.keep((1, 1, 1, 2)).ravel().tolist() == [False, True])
    v = np.array([[[1], [1.5e-38]]], np.float32)
    example = Example(q=q, k=k, v=v, scale=1.0, dropout=drops_first)
    assert 1e-37 < example.exact.o.min()  # 256 times a product that is below the smallest normal number
    assert_within_bounds(example, o=np.zeros_like(q))


def test_one_key_with_one_number_gives_the_formula_by_hand():
    u, ua, s = 2**-11, 2**-24, 3.0
    bound = error_bound(*(np.full((1, 1), x, np.float16) for x in (s, 1, 5)), scale=1.0)
    eta = (1 + 4) * ua * s + 4 * ua * (s + s) + 4 * ua
    r = math.expm1(eta)
    tol_lse = eta + (1 + 8) * ua + 4 * ua * (s + s)
    tol_o = (1 + r) * (5 * r + 5 * r + (ua + 2 * (1 + 8) * ua) * 5 * (1 + r) + 2**-126 * 5) + u * 5
    spread = (ua + 2 * (1 + 8) * ua + 2**-126 + u) * 5
    underflow = 2**-25 + 2**-126
    assert bound.lse.item() == pytest.approx(1.5 * tol_lse)
    assert bound.o.item() == pytest.approx(1.5 * (min(tol_o, spread) + underflow))


def test_results_of_a_row_without_keys_are_exact():
    q = k = v = np.ones((3, 2), np.float32)
    bounds = error_bound(q, k, v, q, mask=masks.Lengths(q=1))
    assert not bounds.o[1:].any() and not bounds.lse[1:].any()
    assert bounds.o[0].all() and bounds.lse[0] > 0


def test_bounds_have_the_shapes_of_what_they_bound():
    q, k, v = np.ones((3, 1, 4, 5, 8)), np.ones((2, 2, 6, 8)), np.ones((1, 2, 6, 7))
    bounds = error_bound(q, k, v, np.ones((3, 2, 4, 5, 7)))
    assert [getattr(bounds, name).shape for name in RESULTS] == [
        (3, 2, 4, 5, 7), (3, 2, 4, 5), q.shape, k.shape, v.shape,
    ]  # fmt: skip


def test_gradients_have_no_bounds_without_do():
    bounds = error_bound(*np.ones((3, 4, 2)))
    assert (bounds.dq, bounds.dk, bounds.dv) == (None, None, None)


def test_masks_are_those_of_attention():
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    dense = np.tri(6, dtype=bool) & ~np.tri(6, k=-3, dtype=bool)
    for options in ({"causal": True, "window": (2, None)}, {"mask": masks.SlidingWindow(2, 0)}, {"mask": dense}):
        assert np.array_equal(error_bound(q, k, v, **options).o, error_bound(q, k, v, mask=dense).o)
    with pytest.raises(cuflash.UnsupportedProblem, match="bottom_right"):
        error_bound(q[:3], k, v, causal=True)


def test_a_finer_dtype_has_a_smaller_bound():
    example = GAUSSIAN.example()
    halves = [getattr(example, each).astype(np.float16) for each in ("q", "k", "v", "do")]
    float64, float32, float16 = (
        error_bound(*(x.astype(dtype) for x in halves), causal=True) for dtype in (np.float64, np.float32, np.float16)
    )
    for name in RESULTS:
        assert (getattr(float64, name) < getattr(float32, name)).all(), name
        assert (getattr(float32, name) <= getattr(float16, name)).all(), name


def test_probable_bounds_are_never_larger():
    example = GAUSSIAN.example()
    for name in RESULTS:
        guaranteed, probable = (getattr(bounds, name) for bounds in (example.bounds, example.probable_bounds))
        assert (probable <= guaranteed).all() and (probable < guaranteed).any(), name


@pytest.mark.parametrize(("seqlen", "probable"), [(128, False), (1024, False), (8192, True)])
def test_the_bound_on_lse_sees_one_average_key_missing(seqlen, probable):
    q, k = (
        np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)
        for seed, rows in ((0, 4), (1, seqlen))
    )
    bound = error_bound(q, k, k, probable=probable).lse
    assert (bound < -np.log1p(-1 / seqlen)).all()


def test_keys_that_no_query_attends_take_no_part():
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 2))
    k[2:], v[2:] = np.nan, np.inf
    bounds = error_bound(q, k, v, q, mask=masks.Lengths(kv=2))
    cut = error_bound(q, k[:2], v[:2], q)
    for name in ("o", "lse", "dq"):
        # Hidden keys only add roundings, so the bounds are at least those without these keys.
        assert np.isfinite(getattr(bounds, name)).all() and (getattr(bounds, name) >= getattr(cut, name)).all()


def test_nothing_is_promised_where_the_dtype_may_overflow():
    q, k = np.ones((1, 1), np.float16), np.ones((1, 1), np.float16)
    bounds = error_bound(q, k, np.full((1, 1), 65504, np.float16))
    assert np.isposinf(bounds.o).all() and np.isfinite(bounds.lse).all()


def check_overflow(library):
    """Check that bounds are infinite where a sum may overflow, though the exact results are within the dtype."""
    x, most = np.ones((2, 1), np.float32), float(np.finfo(np.float32).max)
    of_values = library.error_bound(x, x, x * np.float32(0.9 * most))
    assert np.isposinf(of_values.o).all() and np.isfinite(of_values.lse).all()
    of_products = library.error_bound(x * np.float32([[0.5 * most], [0.9 * most]]), x[:1], x[:1])
    assert np.isposinf(of_products.o).ravel().tolist() == [False, True]
    far = x * np.float32(1e20)
    k, v = np.float32([[0], [-60]]), np.float32([[0], [1e20]])  # dP of key 1 is 1e40, its weight is exp(-60)
    of_gradients = library.error_bound(x, k, v, far, scale=1.0)
    assert np.isposinf(of_gradients.dq).all() and np.isfinite(of_gradients.o).all()
    of_scores = library.error_bound(x, far * 10, x, x * np.float32(1e19), scale=1e-21)  # dS times k, before the scale
    assert np.isposinf(of_scores.dq).all() and np.isfinite(of_scores.dk).all()
    of_tangents = library.error_bound(x, x, x, tangents={"k": x * np.float32(0.9 * most), "v": x})
    assert np.isposinf(of_tangents.lse_dot).all() and np.isfinite(of_tangents.o).all()
    of_second = library.error_bound(x, k, x, far, scale=1.0, tangents={"v": v})
    assert np.isposinf(of_second.dq_dot).all() and np.isfinite(of_second.o_dot).all()


def test_nothing_is_promised_of_sums_that_may_overflow():
    check_overflow(cuflash)


def test_nothing_is_promised_of_gradients_through_a_ds_that_may_overflow():
    """dS of query 0 with keys 0 and 1 is 90000. Query 1 has no gradient, and it alone attends key 2."""
    q, k = np.full((2, 1), 0.01, np.float16), np.zeros((3, 1), np.float16)
    v, do = np.array([[600], [0], [0]], np.float16), np.array([[600], [0]], np.float16)
    options = {"mask": np.array([[True, True, False], [False, False, True]])}
    exact = error_bound(q, k, v, do, **options)
    assert all(np.isfinite(x).all() for x in (exact.dq, exact.dk, exact.dv))
    rounded = error_bound(q, k, v, do, product_dtype=np.float16, **options)
    assert np.isposinf(rounded.dq).ravel().tolist() == [True, False]
    assert np.isposinf(rounded.dk).ravel().tolist() == [True, True, False]
    assert np.isfinite(rounded.dv).all() and np.isfinite(rounded.o).all()
    assert np.isfinite(error_bound(q, k, v, do, product_dtype=ml_dtypes.bfloat16, **options).dk).all()


def test_scores_without_a_correct_digit_leave_the_spread_of_values_and_no_gradient():
    q, k, v = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(np.float32)
    bounds = error_bound(q, k, v, v, scale=1e9)
    assert (bounds.o <= 2 * (v.max(axis=0) - v.min(axis=0))).all()
    assert np.isposinf(bounds.dk).any() and not np.isnan(bounds.dk).any()


@pytest.mark.parametrize("product_dtype", [np.float16, ml_dtypes.bfloat16])
def test_rounding_p_costs_its_roundoff(product_dtype):
    example = GAUSSIAN.example()
    bound, rounded = example.bounds.o, example.but(product_dtype=product_dtype).bounds.o
    assert (rounded > bound).all()
    assert rounded.max() < 2 * float(ml_dtypes.finfo(product_dtype).eps) * np.abs(example.v).max()


_QKV = np.random.default_rng(1).standard_normal((4, 2, 3, 40, 16)).astype(np.float16)
_SINK, _SLOPE = np.ones(3, np.float32), np.array([0.5, 0.25, 0.1], np.float32)
_ALIBI = cuflash.scores.Score(lambda s, b, h, i, j, slope: s - slope[h] * (i - j), slope=_SLOPE)
PLANNED = {
    "a band and a sink": {"window": (3, 0), "sink": _SINK, "wrt": "sink"},
    "a mask of arrays": {"mask": masks.Documents(np.repeat([0, 1], 20)), "scale": 0.3},
    "a score with a gradient": {"score": _ALIBI, "wrt": "slope"},
    "a cap and a bias": {"softcap": 3.0, "bias": _QKV[0, 0, :, :, :1] * np.ones(40, np.float16)},
    "dropout by an array": {"dropout": cuflash.Dropout(0.25, seed=np.array(3), offset=2)},
}


@pytest.mark.parametrize(("device", "kernel", "product_dtype"), [
    (None, "auto", None), ("H100", "sm90", np.float16), ("H100", "sm80", np.float16), ("H100", "simt", None),
])
@pytest.mark.parametrize("options", PLANNED.values(), ids=PLANNED)
def test_a_plan_gives_the_bounds_of_its_options_and_of_what_its_kernels_round(options, device, kernel, product_dtype):
    q, k, v, do = _QKV
    where = {} if device is None else {"device": cuflash.DeviceSpec.gpu(device), "kernel": kernel}
    planned = error_bound(q, k, v, do, plan=cuflash.plan(q, k, v, **options, **where), sink=options.get("sink"))
    named = error_bound(q, k, v, do, product_dtype=product_dtype, **options)
    assert all(np.array_equal(getattr(planned, name), getattr(named, name)) for name in RESULTS)
    assert np.array_equal(planned.dsink, named.dsink, equal_nan=True) if "sink" in options else planned.dsink is None
    assert planned.others.keys() == named.others.keys()
    assert all(np.array_equal(planned.others[name], named.others[name]) for name in named.others)


def test_a_plan_is_refused_beside_its_options_and_for_other_arrays():
    q = np.ones((2, 10, 8), np.float32)
    of_shape = cuflash.plan(q, q, q, bias=cuflash.ShapeDtype((10, 10), np.float32))
    for message, arguments in {
        "plan must be a Plan or None; got 3": {"plan": 3},
        "product_dtype must be left out if plan is": {"plan": cuflash.plan(q, q, q), "product_dtype": np.float16},
        "sink must be None, as planned": {"plan": cuflash.plan(q, q, q), "sink": np.ones(2, np.float32)},
        "sink must have shape (2,)": {"plan": cuflash.plan(q, q, q, sink=np.ones(2, np.float32))},
        "plan must be created with the array bias": {"plan": of_shape},
    }.items():
        with pytest.raises(cuflash.UnsupportedProblem) as caught:
            error_bound(q, q, q, **arguments)
        assert any(reason.startswith(message) for reason in caught.value.reasons)
    x8 = cuflash.quantize(q)
    with pytest.raises(cuflash.UnsupportedProblem, match="plan must be None for Quantized"):
        error_bound(x8, x8, x8, plan=cuflash.plan(q, q, q))
