"""
Your own score functions
========================
A score function is a Python function of the score and of the batch entry, head, query and key, traced once and compiled
into every kernel. Captured arrays, passed by name, get gradients.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import scores

SEQLEN = 24
QUERIES, KEYS = np.ogrid[:SEQLEN, :SEQLEN]


def near(s, b, h, i, j):
    """Add 1 to the score of each key that is at most 2 away."""
    return s + np.where(abs(i - j) <= 2, 1.0, 0.0)


# %%
# Composition and packed sequences
# --------------------------------
# `a @ b` applies b first, then a. In a packed batch `within` restarts positions at each sequence.

slopes = scores.alibi(scores.alibi_slopes(8))
named = {
    "near keys": scores.Score(near),
    "alibi @ near keys": slopes @ scores.Score(near),
    "alibi within sequences": scores.within(slopes, [0, 8, 13, SEQLEN]),
}
figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for axes, (title, score) in zip(panels, named.items()):
    added = np.broadcast_to(
        score(np.zeros((SEQLEN, SEQLEN)), 0, 0, QUERIES, KEYS), (SEQLEN, SEQLEN)
    )
    image = axes.imshow(
        added, cmap="RdBu", vmin=-abs(added).max(), vmax=abs(added).max()
    )
    figure.colorbar(image, ax=axes, shrink=0.7)
    axes.set(title=title, xticks=[], yticks=[])

# %%
# Learn a bias
# ------------
# The gradient of a captured array comes with those of q, k and v. Here a bias per distance is learned so that attention
# copies the token five positions earlier.

rng = np.random.default_rng(0)
q, k = rng.standard_normal((2, 1, 64, 16))
v = rng.standard_normal((1, 64, 16))
target = np.roll(v, 5, axis=-2)
target[:, :5] = v[:, :1]
learned = np.zeros((1, 64))
losses = []
for step in range(150):
    score = scores.Score(
        lambda s, b, h, i, j, learned: s + learned[h, np.maximum(i - j, 0)],
        learned=learned,
    )
    o, vjp = cuflash.attention_vjp(q, k, v, score=score, causal=True, wrt="learned")
    losses.append(((o - target) ** 2).mean())
    learned -= 20 * vjp(2 * (o - target) / o.size)["learned"]
_, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.plot(losses)
left.set(xlabel="step", ylabel="loss")
right.bar(range(12), learned[0, :12])
right.set(xlabel="distance of the key", ylabel="learned bias")
plt.show()
