"""
Selectors on a real head
========================
A selector chooses, for each block of queries, a few blocks of keys (top-k) from q and k. `oracle` chooses the blocks with
the largest exact mass, which is the upper limit; `local` takes the nearest blocks, and `random` random ones.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import selectors
from cuflash.selectors import Budget

data = np.load("../../experiments/data/minilm_activations.npz")
q, k, v = (data[name][2].astype(np.float32) for name in "qkv")
names = ("oracle", "pooled", "antidiagonal", "local", "random")
figure, panels = plt.subplots(1, 4, figsize=(12, 3.2), layout="constrained")
mass = cuflash.study.block_mass(q, k, block=32)
panels[0].imshow(mass[0] ** 0.5, cmap="Blues")
panels[0].set(title="exact mass of blocks, head 0", xticks=[], yticks=[])
for axes, name in zip(panels[1:], ("oracle", "pooled", "local")):
    index = getattr(selectors, name)(q, k, block=32, budget=Budget(top_k=4))
    axes.imshow(
        index.filled().as_mask().toarray(512, num_heads=12)[0, ::32, ::32], cmap="Blues"
    )
    axes.set(title=name, xticks=[], yticks=[])

# %%
# Recall over the budget
# ----------------------

_, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
budgets = (1, 2, 4, 8, 12)
for name in names:
    select, shares = getattr(selectors, name), []
    for top_k in budgets:
        index = select(q, k, block=32, budget=Budget(top_k=top_k))
        shares.append(cuflash.study.recall(q, k, v, mask=index).mass.mean())
    axes.plot(budgets, shares, "o-", label=name)
axes.set(xlabel="key blocks per query block, of 16", ylabel="share of the softmax kept")
axes.legend()
plt.show()
