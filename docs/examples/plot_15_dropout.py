"""
Reproducible dropout
====================
Dropped weights are a function of seed, offset and position: the same call drops the same weights on every device, and the
backward pass draws them again instead of storing them.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np

dropout = cuflash.Dropout(0.3, seed=1, offset=0)
figure, panels = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for axes, each in zip(
    panels,
    (dropout, cuflash.Dropout(0.3, seed=1, offset=1), cuflash.Dropout(0.3, seed=2)),
):
    axes.imshow(each.keep((1, 32, 32))[0], cmap="Greys")
    axes.set(title=f"seed {each.seed}, offset {each.offset}", xticks=[], yticks=[])

# %%
# The mean over many steps approaches attention without dropout.

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 4, 64, 16))
exact, total, errors = cuflash.attention(q, k, v), 0, []
for step in range(1, 257):
    total = total + cuflash.attention(
        q, k, v, dropout=cuflash.Dropout(0.3, seed=1, offset=step)
    )
    errors.append(abs(total / step - exact).mean())
_, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.loglog(range(1, 257), errors)
axes.set(xlabel="steps in the mean", ylabel="mean difference from no dropout")
plt.show()
