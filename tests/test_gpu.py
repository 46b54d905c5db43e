"""The gpu executor on a GPU: results within their bounds, streams, captures, memory, other libraries, other processes."""

from __future__ import annotations

import multiprocessing
import statistics
import time

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import BlockIndex, checks, masks
from cuflash.testing import assertions, strategies

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
SHAPE = masks.MaskShape((2,), 4, 190, 250)
MASKS = {
    "dense": None,
    "causal": masks.Causal("bottom_right"),
    "window": masks.SlidingWindow(50, 3, align="top_left"),
    "lengths": masks.Lengths(q=np.array([0, 190]), kv=np.array([250, 17])),
    "prefix": masks.PrefixLM(30, "bottom_right"),
    "documents": masks.Documents(np.sort(RNG.integers(0, 5, 190)), np.sort(RNG.integers(0, 5, 250))),
    "dilated": masks.Dilated(3, align="top_left"),
    "function": masks.FromFunction(lambda b, h, i, j: (i * 7 + j * j + h) % 5 < 2),
    "blocks": masks.BlockPattern(RNG.random((4, 6, 8)) < 0.4, 32),
    "small blocks": masks.BlockPattern(RNG.random((48, 63)) < 0.3, 4),
    "random": masks.Dense(RNG.random((190, 250)) < 0.3),
}


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def drawn(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def sent(cupy, *arrays):
    return [cupy.asarray(array) for array in arrays]


def listed(mask):
    """A mask with arrays of the host, as a list that goes to the device once; a mask without them as it is."""
    try:
        hash(mask)
        return mask
    except TypeError:
        return BlockIndex.from_mask(mask, SHAPE, 32)


def on_host(results):
    return {name: result.get() for name, result in results.items()}


def assert_right(cupy, q, k, v, do, dlse, mask, **options):
    """All results of a call are within the bounds of its problem."""
    given = listed(mask)
    (o, lse), vjp = cuflash.attention_vjp(*sent(cupy, q, k, v), mask=given, return_lse=True, **options)
    dq, dk, dv = vjp(*sent(cupy, do, dlse))
    batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if mask is None:
        dense = np.ones((q.shape[-2], k.shape[-2]), bool)
    else:
        dense = mask.dense(masks.MaskShape(batch, q.shape[-3], q.shape[-2], k.shape[-2]))
    bounds = cuflash.error_bound(q, k, v, do, mask=dense, dlse=dlse)
    wide = [array.astype(np.float64) for array in (q, k, v)]
    (ro, rlse), rvjp = cuflash.reference.attention(*wide, mask=dense), None
    rdq, rdk, rdv = cuflash.reference.attention_vjp(*wide, do.astype(np.float64), mask=dense, dlse=dlse)
    expected = {"o": ro, "lse": rlse, "dq": rdq, "dk": rdk, "dv": rdv}
    for name, result in on_host({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}).items():
        both_empty = np.isneginf(result) & np.isneginf(expected[name])
        with np.errstate(invalid="ignore"):
            error = np.where(both_empty, 0, np.abs(result.astype(np.float64) - expected[name]))
        assert (error <= getattr(bounds, name)).all(), f"{name}: {np.nanmax(error / getattr(bounds, name))} of its bound"
