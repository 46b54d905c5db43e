"""
A property test that finds a bug
================================
This attention is correct for equal numbers of heads and wrong for grouped heads (GQA): it pairs query heads with
key/value heads by modulo. `cuflash.testing` draws examples, compares with the exact result within error bounds, and shrinks
the failure to one line that reproduces it.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import testing
from hypothesis import given, settings


def my_attention(q, k, v, mask, scale):
    if q.ndim > 2:
        heads = (
            np.arange(q.shape[-3]) % k.shape[-3]
        )  # the bug: should be // (q.shape[-3] // k.shape[-3])
        k, v = k[..., heads, :, :], v[..., heads, :, :]
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ v / np.where(total == 0, 1, total)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(testing.examples(dtypes=["float64"]))
def test_my_attention(example):
    o = my_attention(example.q, example.k, example.v, example.dense_mask, example.scale)
    testing.assert_within_bounds(example, o=o)


try:
    test_my_attention()
except AssertionError as error:
    print(error)

# %%
# Where is it wrong?
# ------------------
# Four query heads and two key/value heads: heads 1 and 2 attend to the keys of the wrong head.

rng = np.random.default_rng(0)
q, (k, v) = rng.standard_normal((4, 50, 8)), rng.standard_normal((2, 2, 50, 8))
difference = abs(my_attention(q, k, v, None, 8**-0.5) - cuflash.attention(q, k, v))
_, axes = plt.subplots(figsize=(6, 2), layout="constrained")
image = axes.imshow(difference.max(axis=-1), aspect="auto", cmap="Reds")
axes.set(xlabel="query", ylabel="head", yticks=range(4))
plt.colorbar(image, ax=axes)
plt.show()
