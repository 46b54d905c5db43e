"""
A sweep over patterns and budgets
=================================
A sweep is a loop over options, with a table of rows. Here: which window and how many first tokens does each head of a small
language model need? ``python -m experiments sweep`` runs such loops over several processes or a cluster, and resumes them.
"""

from itertools import product

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks

data = np.load("../../experiments/data/language_activations.npz")
q, k, v = (data[name].astype(np.float32) for name in "qkv")  # 4 heads, 512 tokens
windows, first = (2, 4, 8, 16, 32, 64), (0, 1, 4, 16)
mass = np.zeros((4, len(first), len(windows)))
for (a, sinks), (b, window) in product(enumerate(first), enumerate(windows)):
    local = masks.SlidingWindow(window - 1, 0)
    mask = masks.Causal() & (local | masks.Lengths(kv=sinks) if sinks else local)
    mass[:, a, b] = cuflash.study.recall(q, k, v, mask=mask, causal=True).mass.mean(
        axis=-1
    )

# %%
# One panel per head: the share of the causal softmax that is kept.

figure, panels = plt.subplots(1, 4, figsize=(12, 2.8), layout="constrained")
for head, (axes, share) in enumerate(zip(panels, mass)):
    image = axes.imshow(share, vmin=0, vmax=1, cmap="viridis", origin="lower")
    axes.set(
        title=f"head {head}",
        xlabel="window",
        xticks=range(len(windows)),
        xticklabels=windows,
    )
    axes.set(yticks=range(len(first)), yticklabels=first)
panels[0].set(ylabel="first tokens kept")
figure.colorbar(image, ax=panels)

# %%
# The smallest pattern that keeps 95 % of each head:

for head, share in enumerate(mass):
    rows = [
        (windows[b] + first[a], windows[b], first[a])
        for a, b in zip(*np.nonzero(share >= 0.95))
    ]
    print(
        f"head {head}:",
        "none" if not rows else "window {1}, first {2}".format(*min(rows)),
    )
plt.show()
