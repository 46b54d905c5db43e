"""
Masks: the algebra, and your own rules
======================================
Masks combine with `&`, `|`, `^` (in exactly one of the two), `-` (without) and `~` (not). Functions of the indices and
boolean arrays can be used directly.
"""

import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks

SEQLEN = 24


def show(**named: masks.Mask) -> None:
    """Draw one panel per mask."""
    figure, panels = plt.subplots(
        1, len(named), figsize=(3 * len(named), 3.2), layout="constrained"
    )
    for axes, (title, mask) in zip(panels, named.items()):
        mask.plot(SEQLEN, ax=axes)
        axes.set(title=title.replace("_", " "), xticks=[], yticks=[])


# %%
# The algebra
# -----------

documents = np.repeat([0, 1, 2], [6, 11, 7])
show(
    window_and_sinks=masks.Causal() & (masks.SlidingWindow(4, 0) | masks.Lengths(kv=2)),
    not_causal=~masks.Causal(),
    with_a_hole=masks.Causal() - (masks.Lengths(kv=12) - masks.Lengths(kv=6)),
    in_only_one=masks.SlidingWindow(8, 8) ^ masks.Documents(documents),
)

# %%
# Your own rule
# -------------
# `FromFunction` takes any function of batch entry, head, query and key that returns booleans for arrays of indices. A
# mask combines with a plain function or a boolean array directly.

side = 6  # a picture of 4 rows of 6 pixels, read row by row
neighbors = masks.FromFunction(
    lambda b, h, i, j: (abs(i // side - j // side) <= 1)
    & (abs(i % side - j % side) <= 1)
)
rng = np.random.default_rng(0)
show(
    neighbors_in_an_image=neighbors,
    every_third_key=masks.Causal() & (lambda b, h, i, j: (i - j) % 3 == 0),
    any_booleans=masks.Causal() & (rng.random((SEQLEN, SEQLEN)) < 0.3),
)
plt.show()
