"""Recall equals the recall computed from the softmax in float64."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import masks


@st.composite
def problems(draw, library=cuflash):
    """Draw q, k, v, a mask of all query heads, and the alignment of the causal diagonal, if there is one."""
    seqlen_q, seqlen_kv = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    kv_heads, group, batch = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([(), (2,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q = rng.standard_normal((*batch, kv_heads * group, seqlen_q, 5))
    k, v = rng.standard_normal((2, *batch, kv_heads, seqlen_kv, 5))
    shape = library.masks.MaskShape(batch, kv_heads * group, seqlen_q, seqlen_kv)
    of_library = importlib.import_module(f"{library.__name__}.testing.strategies")
    return q, k, v, draw(of_library.masks(shape)), draw(st.sampled_from((False, "bottom_right", "top_left")))


def test_all_that_is_wrong_is_told_before_anything_is_computed(monkeypatch):
    module = importlib.import_module("cuflash.study._recall")
    computed, attention = [], module.attention

    def counted(*arrays, **options):
        computed.append(attention(*arrays, **options))
        return computed[-1]

    monkeypatch.setattr(module, "attention", counted)
    q = np.ones((2, 5, 8), np.float32)
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        cuflash.study.recall(q, q, q, mask=np.ones((5, 5)), causal=3, scale=np.nan)
    assert sorted(reason.split()[0] for reason in caught.value.reasons) == ["causal", "mask", "scale"]
    with pytest.raises(cuflash.UnsupportedProblem, match="mask must broadcast"):
        cuflash.study.recall(q, q, q, mask=np.ones((4, 4), bool))
    assert not computed


def weights(q, k, allowed, bias=0.0, softcap=None):
    """Return softmax weights over the allowed keys; a row without one has weights of 0."""
    k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    e = np.exp(scores + bias) * allowed
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def tolerance(q, k, eps, block, largest_bias=0.0):
    """Return a mass's first-order relative error: twice a score's error, since lse has one too, and that of sums.

    A bias is rounded four times, like a score after its products. Exponentials and tensor-core products add errors of a
    few units in the last place.
    """
    wide_q, wide_k = np.abs(q.astype(np.float64)), np.abs(k.astype(np.float64))
    wide_k = wide_k.repeat(q.shape[-3] // k.shape[-3], axis=-3)
    dim, num_keys = q.shape[-1], k.shape[-2]
    largest = (wide_q @ wide_k.swapaxes(-1, -2)).max() * dim**-0.5
    return float(eps * (4 * (dim + 4) * largest + 4 * 4 * largest_bias + 2 * num_keys + block[0] + 16))


EXACT = np.finfo(np.float64).eps


def check_recall(library, problem):
    q, k, v, mask, causal = problem
    lengths = q.shape[-2], k.shape[-2]
    allowed = mask.toarray(*lengths, batch=q.shape[:-3], num_heads=q.shape[-3])
    eligible = library.masks.Causal(causal).toarray(*lengths) if causal else np.ones(lengths, bool)
    recalled = library.study.recall(q, k, v, mask=mask, causal=causal)
    p, sparse = weights(q, k, eligible), weights(q, k, eligible & allowed)
    has_key = np.broadcast_to(eligible.any(-1), q.shape[:-1])
    assert isinstance(recalled, library.study.Recall)
    assert recalled.mass.shape == q.shape[:-1] and type(recalled.output_error) is float
    relative = tolerance(q, k, EXACT, (1, 1))
    np.testing.assert_allclose(recalled.mass, np.where(has_key, (p * allowed).sum(-1), 1), rtol=relative)

    v = np.repeat(v, q.shape[-3] // v.shape[-3], axis=-3)
    whole, change = np.linalg.norm(p @ v), np.linalg.norm(sparse @ v - p @ v)
    expected = change / whole if whole else 0.0
    # Weights have the relative error of masses, and so do the weighted sums of |v|, both here and in the library.
    error = 2 * relative * (np.linalg.norm(p @ np.abs(v)) + np.linalg.norm(sparse @ np.abs(v)))
    bound = (1 + expected) * error / whole if whole else 0.0
    assert abs(recalled.output_error - expected) <= bound


def check_scored(library, problem):
    """Check that score functions, a softcap, a bias and a window work in both calls.

    A bias and a capped score have the rounding errors of scores, except for those of products.
    """
    q, k, v, mask, causal = problem
    lengths = q.shape[-2], k.shape[-2]
    bias, offset = np.random.default_rng(lengths).standard_normal((2, q.shape[-3], *lengths))
    allowed = mask.toarray(*lengths, batch=q.shape[:-3], num_heads=q.shape[-3])
    eligible = library.masks.Causal(causal).toarray(*lengths) if causal else np.ones(lengths, bool)
    window = None
    if causal or lengths[0] == lengths[1]:
        window = (5, 3)
        eligible = eligible & library.masks.SlidingWindow(*window, causal or None).toarray(*lengths)
    score = library.scores.bias(offset).renamed({"bias": "offset"})
    options = {"window": window, "softcap": 2.0, "bias": bias, "score": score}
    recalled = library.study.recall(q, k, v, mask=mask, causal=causal, **options)
    has_key = np.broadcast_to(eligible.any(-1), q.shape[:-1])
    exact = np.where(has_key, (weights(q, k, eligible, bias + offset, 2.0) * allowed).sum(-1), 1)
    largest = np.abs(bias).max(initial=0) + np.abs(offset).max(initial=0) + 2.0
    np.testing.assert_allclose(recalled.mass, exact, rtol=tolerance(q, k, EXACT, (1, 1), largest))


@settings(max_examples=60)
@given(problems())
def test_the_mass_is_the_softmax_s_and_the_error_the_output_s(problem):
    check_recall(cuflash, problem)


@settings(max_examples=30)
@given(problems())
def test_the_mass_is_that_of_the_changed_scores(problem):
    check_scored(cuflash, problem)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_everything_is_kept_by_a_mask_of_everything(dtype):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8)).astype(dtype)
    recalled = cuflash.study.recall(q, k, v, mask=masks.Band(), causal=True, scale=3.0)
    assert (
        (recalled.mass == 1).all()
        and recalled.output_error == 0
        and recalled.mass.dtype == max(dtype, np.float32, key=np.dtype)
    )
    nothing = cuflash.study.recall(q, k, v, mask=~masks.Band(), scale=3.0)
    assert (nothing.mass == 0).all() and nothing.output_error == 1


def test_an_output_of_zeros_has_no_error_unless_it_changes():
    q, k, v = np.zeros((3, 1, 2, 4))
    assert cuflash.study.recall(q, k, v, mask=masks.Band(0, 0)).output_error == 0
    v = np.stack([np.ones((2, 4)), -np.ones((2, 4))])[:, 0][None]
    assert cuflash.study.recall(q, k, v, mask=masks.Band(0, 0)).output_error == np.inf


def test_wrong_inputs_are_refused_as_attention_refuses_them():
    q = np.ones((2, 4, 3))
    with pytest.raises(cuflash.UnsupportedProblem, match="scale must be"):
        cuflash.study.recall(q, q, q, mask=masks.Causal(), scale=np.nan)
    with pytest.raises(TypeError, match="mask must be a Mask"):
        cuflash.study.recall(q, q, q, mask="causal")
    with pytest.raises(TypeError, match=r"mask must be .* keys to keep; got None: use masks.Band\(\) to keep all"):
        cuflash.study.recall(q, q, q, mask=None)
    np.testing.assert_array_equal(cuflash.study.recall(q, q, q, mask=masks.Band()).mass, np.ones((2, 4)))
