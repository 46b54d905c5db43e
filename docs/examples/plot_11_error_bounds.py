"""
Error bounds of every element
=============================
`error_bound` computes, from the inputs of a call, a bound on the error of every element of the results. Errors of correct
code stay below it; a wrong key, a missing rescale or a narrow accumulator does not.
"""

import cuflash
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

rng = np.random.default_rng(0)
x = rng.standard_normal((3, 4, 256, 64))
_, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
    q, k, v = x.astype(dtype)
    o = cuflash.attention(q, k, v, causal=True)
    exact, _ = cuflash.reference.attention(
        *(y.astype(float) for y in (q, k, v)), mask=np.tri(256, dtype=bool)
    )
    share = abs(o.astype(float) - exact) / cuflash.error_bound(q, k, v, causal=True).o
    axes.hist(
        share.ravel(),
        bins=np.linspace(0, 1, 60),
        histtype="step",
        label=np.dtype(dtype).name,
    )
    print(f"{np.dtype(dtype).name:9} largest error over its bound: {share.max():.2f}")
axes.axvline(1, color="0.6")
axes.set(xlabel="error over its bound", ylabel="elements", yscale="log")
axes.legend()
plt.show()
