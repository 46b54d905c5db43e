"""
Gradients through any mask
==========================
`attention_vjp` returns the result and a function that computes the gradients of q, k and v, through any mask.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks, patterns

rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, 1, 128, 16))
mask = masks.Causal() & patterns.butterfly(128, block=16)
o, vjp = cuflash.attention_vjp(q, k, v, mask=mask)
dq, dk, dv = vjp(do)

# %%
# A directional derivative checks the gradient: central differences agree until rounding errors dominate.

step = rng.standard_normal(q.shape)
slope = (dq * step).sum()
sizes = 10.0 ** np.arange(-9, 0)
errors = []
for h in sizes:
    upper, lower = (
        cuflash.attention(q + sign * h * step, k, v, mask=mask) for sign in (1, -1)
    )
    errors.append(abs(((upper - lower) * do).sum() / (2 * h) - slope) / abs(slope))
_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.loglog(sizes, errors, "o-")
axes.set(xlabel="step of the difference", ylabel="relative difference from vjp")

# %%
# Which tokens influence one query?
# ---------------------------------
# With do = 0 except in one row, dk and dv are zero for every key that the query does not attend.

one = np.zeros_like(do)
one[:, 100] = 1
_, dk, dv = vjp(one)
_, axes = plt.subplots(figsize=(8, 2), layout="constrained")
axes.bar(range(128), abs(dv[0]).sum(axis=-1))
axes.set(
    xlabel="key",
    ylabel="|dv|",
    title="gradient of query 100, through a causal butterfly",
)
plt.show()
