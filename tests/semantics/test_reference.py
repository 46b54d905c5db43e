"""The specification matches hand-computed tables and the oracle, and its gradients match its own slopes."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import cuflash
from cuflash import masks, reference
from cuflash.bounds import error_bound
from cuflash.testing import Structure, assert_within, assert_within_bounds, examples


def columns(*values):
    return np.array(values, float)[:, None]


def agree(o, lse, *operands, **options):
    """Assert that the specification returns this o and lse."""
    bounds = error_bound(*operands, **options)
    for name, result, expected in zip(("o", "lse"), reference.attention(*operands, **options), (o, lse)):
        assert_within(name, result, expected, getattr(bounds, name))


def test_equal_scores_average_the_values_a_row_attends():
    causal = np.tri(3, dtype=bool)
    agree(columns(3, 4.5, 6), np.log([1, 2, 3]), np.zeros((3, 2)), np.zeros((3, 2)), columns(3, 6, 9), mask=causal)


def test_scores_weigh_the_values():
    agree(columns(2), np.log([8]), columns(1), np.log(columns(1, 2, 5)), columns(8, 4, 0), scale=1.0)


@given(examples(has_sink=True, longest=20, widest=8))
def test_the_weights_are_what_v_is_multiplied_by(example):
    arguments = {"mask": example.dense_mask, "scale": example.scale, "sink": example.sink}
    o, lse = reference.attention(example.q, example.k, example.v, **arguments)
    same_o, same_lse, weights = reference.attention(example.q, example.k, example.v, **arguments, return_weights=True)
    np.testing.assert_array_equal(same_o, o)
    np.testing.assert_array_equal(same_lse, lse)
    assert weights.shape == (*lse.shape, example.k.shape[-2])
    v = np.eye(example.k.shape[-2])
    if example.v.ndim > 2:
        v = np.broadcast_to(v, (*example.v.shape[:-2], *v.shape))
    identity, _ = reference.attention(example.q, example.k, v, **arguments)
    np.testing.assert_allclose(np.broadcast_to(weights, identity.shape), identity, rtol=1e-15)


WRONG_SHAPES = {
    "k must have q's head_dim and a divisor of its heads": {"k": (2, 3, 6, 5)},
    "and its length; got shapes (2, 4, 6, 5), (2, 4, 6, 5) and (2, 2, 6, 5)": {"v": (2, 2, 6, 5)},
    "or all of them (length, dim); got shapes (5,), (2, 4, 6, 5) and (2, 4, 6, 5)": {"q": (5,)},
    "q, k and v must be arrays of shape": {"q": (6, 5)},
    "mask must broadcast to (2, 4, 6, 6); got shape (5, 6)": {"mask": (5, 6)},
    "sink must broadcast to (2, 4); got shape (3, 1, 4)": {"sink": (3, 1, 4)},
    "weight_factors must broadcast to (2, 4, 6, 6); got shape (3, 1, 1, 1, 1)": {"weight_factors": (3, 1, 1, 1, 1)},
    "do must have shape (2, 4, 6, 5); got an array of shape (1, 4, 6, 5)": {"do": (1, 4, 6, 5)},
    "dlse must have shape (2, 4, 6); got an array of shape (2, 1, 24)": {"dlse": (2, 1, 24)},
    "v_dot must have shape (2, 4, 6, 5); got an array of shape (2, 4, 6, 1)": {"v_dot": (2, 4, 6, 1)},
    "do_dot must have shape (2, 4, 6, 5); got an array of shape (6, 5)": {"do_dot": (6, 5)},
}


def check_shapes(library):
    """Check that shapes that do not fit are refused, also those that NumPy would broadcast."""
    whole = dict.fromkeys(("q", "k", "v", "do"), (2, 4, 6, 5)) | {"dlse": (2, 4, 6)}
    for message, changes in WRONG_SHAPES.items():
        arrays = {name: np.ones(shape, bool if name == "mask" else float) for name, shape in (whole | changes).items()}
        calls = {"attention": ("do", "dlse"), "attention_vjp": (), "attention_hvp": ()}
        for name, left_out in calls.items():
            if not set(changes) & {*left_out, "v_dot", "do_dot"} or name == "attention_hvp":
                own = {each: array for each, array in arrays.items() if each not in left_out}
                with pytest.raises(library.UnsupportedProblem, match=re.escape(message)):
                    getattr(library.reference, name)(**own)


def test_shapes_that_do_not_fit_are_refused():
    check_shapes(cuflash)


def test_one_value_head_serves_all_key_heads():
    q = np.random.default_rng(0).standard_normal((2, 4, 6, 5))
    o, _, weights = reference.attention(q, q, np.eye(6), return_weights=True)
    assert np.array_equal(o, weights)


def test_return_weights_is_a_bool():
    with pytest.raises(TypeError, match="return_weights must be True or False; got 1"):
        reference.attention(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)), return_weights=1)


def test_the_scale_is_one_over_the_root_of_head_dim_unless_given():
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 16))
    for ours, given_scale in zip(reference.attention(q, k, v), reference.attention(q, k, v, scale=0.25)):
        assert np.array_equal(ours, given_scale)


def test_query_head_h_reads_key_value_head_h_over_group():
    v = np.array([10.0, 20.0]).reshape(2, 1, 1)
    o, _ = reference.attention(np.zeros((6, 1, 1)), np.zeros((2, 1, 1)), v)
    assert o.ravel().tolist() == [10, 10, 10, 20, 20, 20]


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        (np.float16, np.float64),
        (ml_dtypes.bfloat16, np.float64),
        (np.int8, np.float64),
        (np.longdouble, np.longdouble),
        (np.complex64, np.complex128),
    ],
)
def test_arithmetic_is_float64_or_wider(given_dtype, dtype):
    o, lse = reference.attention(*np.ones((3, 2, 2)).astype(given_dtype))
    assert (o.dtype, lse.dtype) == (dtype, dtype)


def test_an_additive_mask_is_refused():
    with pytest.raises(TypeError, match=r"boolean array, True = attend; got Causal: pass mask.toarray\(\)"):
        reference.attention(np.ones((3, 2)), np.ones((3, 2)), np.ones((3, 2)), masks.Causal())
    with pytest.raises(TypeError, match="mask must be boolean, True = attend; got dtype float64"):
        reference.attention(*np.ones((3, 2, 2)), mask=np.zeros((2, 2)))


@given(examples(dtypes=["float64"]))
def test_the_specification_and_the_oracle_agree(example):
    operands = example.q, example.k, example.v
    o, lse = reference.attention(*operands, example.dense_mask, example.scale)
    dq, dk, dv = reference.attention_vjp(*operands, example.do, example.dlse, example.dense_mask, example.scale)
    assert_within_bounds(example, o=o, lse=lse, dq=dq, dk=dk, dv=dv)


SMALL = [
    Structure(seqlen_q=3, seqlen_kv=4, head_dim=3, value_dim=2, dtype="float64", has_heads=False, scale=0.7),
    Structure(num_heads=4, num_kv_heads=2, seqlen_q=3, seqlen_kv=3, head_dim=2, dtype="float64", mask=masks.Causal()),
    Structure(
        q_batch=(2,), k_batch=(1,), v_batch=(), num_heads=2, seqlen_q=4, seqlen_kv=3, head_dim=2, value_dim=3,
        dtype="float64", mask=masks.Lengths(q=2) | masks.Causal("bottom_right"), scale=2.0,
    ),
]  # fmt: skip


def objective(example, q, k, v):
    """Return sum(do o) + sum(dlse lse) over the rows that have keys, also for complex arguments."""
    o, lse = reference.attention(q, k, v, example.dense_mask, example.scale)
    return (example.do * o).sum() + (example.dlse * np.where(example.allowed.any(axis=-1), lse, 0)).sum()


@pytest.mark.parametrize("structure", SMALL)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_the_complex_step_derivative(structure, name):
    example = structure.example()
    step = 1e-20  # its square vanishes next to any real part, so no difference cancels and the step needs no tuning
    slopes = np.empty(getattr(example, name).shape)
    for place in np.ndindex(slopes.shape):
        operands = {each: getattr(example, each).astype(complex) for each in "qkv"}
        operands[name][place] += 1j * step
        slopes[place] = objective(example, **operands).imag / step
    gradients = dict(zip("qkv", vjp_of(example)))
    bound = getattr(example.bounds, f"d{name}")
    assert_within(f"d{name}", gradients[name], slopes, 2 * bound, example)


def vjp_of(example):
    operands = example.q, example.k, example.v, example.do, example.dlse
    return reference.attention_vjp(*operands, example.dense_mask, example.scale)
