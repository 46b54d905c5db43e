"""
How much of real attention does a pattern keep?
===============================================
`recall` returns the share of the softmax that a mask keeps, for your q, k and v. Here they come from a sentence
encoder (MiniLM) on the opening of *Pride and Prejudice*, from ``experiments/data`` of the repository.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks, patterns

data = np.load("../../experiments/data/minilm_activations.npz")
q, k, v = (
    data[name][1].astype(np.float32) for name in "qkv"
)  # 12 heads of one layer, 512 tokens
named = {
    "window": masks.SlidingWindow(63, 63),
    "window and first tokens": masks.SlidingWindow(63, 63) | masks.Lengths(kv=32),
    "butterfly": patterns.butterfly(512, block=32),
    "bigbird": patterns.bigbird(512, block=32),
    "random": patterns.random(512, block=32, density=0.3),
}
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for title, mask in named.items():
    mass = cuflash.study.recall(q, k, v, mask=mask).mass.mean(axis=-1)  # of each head
    density = cuflash.BlockIndex.from_mask(mask, 512, 512, 32).density
    axes.plot(mass, "o-", label=f"{title}, {density:.0%} of the blocks")
axes.set(xlabel="head", ylabel="share of the softmax kept", ylim=(0, 1))
axes.legend(fontsize="small", loc="lower left")

# %%
# The heads differ: some attend to neighboring tokens, which a window keeps; others to the first token, which a few first
# keys keep. ``python -m cuflash study my.npz`` makes this comparison for your own archive.

plt.show()
