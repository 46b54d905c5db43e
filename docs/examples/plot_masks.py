"""
Masks
=====

A mask says which keys (columns) each query (row) attends. `mask.plot(seqlen_q, seqlen_kv)` draws it by matplotlib: dark
elements are attended. `mask.picture` prints the same as text, and a notebook shows a mask by itself.
"""

import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks

SEQLEN = 24


def show(**named: masks.Mask) -> None:
    """One panel a mask."""
    figure, panels = plt.subplots(1, len(named), figsize=(3 * len(named), 3.2), layout="constrained")
    for axes, (title, mask) in zip(panels, named.items()):
        mask.plot(SEQLEN, ax=axes)
        axes.set(title=title.replace("_", " "), xticks=[], yticks=[])


# %%
# Bands around the diagonal
# -------------------------
# `SlidingWindow((left, right))` counts keys on either side of the diagonal; the query itself is always attended.

show(
    causal=masks.Causal(),
    window=masks.SlidingWindow((5, 0)),
    both_sides=masks.SlidingWindow((3, 3)),
    dilated=masks.Dilated(3, (None, 0)),
)

# %%
# Lengths and documents
# ---------------------
# `Lengths` cuts off padding, `PrefixLM` lets a prefix be attended from everywhere, and `Documents` keeps packed
# sequences apart.

documents = np.repeat([0, 1, 2], [6, 11, 7])
show(
    lengths=masks.Lengths(q=20, kv=16),
    prefix=masks.PrefixLM(8),
    documents=masks.Documents(documents),
    causal_documents=masks.Causal() & masks.Documents(documents),
)

# %%
# The algebra
# -----------
# Masks combine with `&`, `|`, `^` (in one of the two alone), `-` (without) and `~` (not).

show(
    window_and_sinks=masks.Causal() & (masks.SlidingWindow((4, 0)) | masks.Lengths(kv=2)),
    not_causal=~masks.Causal(),
    with_a_hole=masks.Causal() - (masks.Lengths(kv=12) - masks.Lengths(kv=6)),
    in_one_alone=masks.SlidingWindow((8, 8)) ^ masks.Documents(documents),
)

# %%
# A rule of your own
# ------------------
# `FromFunction` takes any function of batch entry, head, query and key that returns booleans for arrays of indices.
# Beside a mask the function alone will do, and so will a boolean array.

side = 6  # a picture of 4 rows of 6 pixels, read row by row
neighbours = masks.FromFunction(
    lambda b, h, i, j: (abs(i // side - j // side) <= 1) & (abs(i % side - j % side) <= 1)
)
rng = np.random.default_rng(0)
show(
    two_dimensional_neighbours=neighbours,
    every_third_key=masks.Causal() & (lambda b, h, i, j: (i - j) % 3 == 0),
    any_booleans=masks.Causal() & (rng.random((SEQLEN, SEQLEN)) < 0.3),
)
plt.show()
