"""
Score functions
===============
Each function of `cuflash.scores` changes the score of a query and a key before the softmax.
:doc:`Score functions </scores>` has the cost of each.
"""

import matplotlib.pyplot as plt
import numpy as np
from cuflash import scores

SEQLEN = 24
QUERIES, KEYS = np.ogrid[:SEQLEN, :SEQLEN]


def show(**named: scores.Score) -> None:
    """Draw one panel per function: its addition to a score of 0, by query and key."""
    figure, panels = plt.subplots(
        1,
        len(named),
        figsize=(3.2 * len(named), 3.2),
        layout="constrained",
        squeeze=False,
    )
    for axes, (title, score) in zip(panels[0], named.items()):
        added = np.broadcast_to(
            score(np.zeros((SEQLEN, SEQLEN)), 0, 0, QUERIES, KEYS), (SEQLEN, SEQLEN)
        )
        image = axes.imshow(
            added, cmap="RdBu", vmin=-abs(added).max(), vmax=abs(added).max()
        )
        figure.colorbar(image, ax=axes, shrink=0.7)
        axes.set(title=title.replace("_", " "), xticks=[], yticks=[])


def draw(**named: scores.Score) -> None:
    """Draw one line per function: the new score over the old one."""
    s = np.linspace(-40, 40, 161)
    _, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.plot(s, s, color="0.8", label="score")
    for title, score in named.items():
        axes.plot(s, score(s, 0, 0, 0, 0), label=title.replace("_", " "))
    axes.set(xlabel="score", ylabel="new score")
    axes.legend()


# %%
# Functions of the score alone
# ----------------------------
# `softcap` keeps scores between its cap and its negative. `temperature` multiplies them by a factor per head.

draw(
    softcap_of_15=scores.softcap(15.0),
    temperature_of_a_half=scores.temperature(np.array([0.5])),
)

# %%
# Functions of the distance
# -------------------------
# `alibi` subtracts a penalty that grows with the distance, with a slope per head. `relative_position` adds a learned
# number per bucket of distances: near the diagonal a bucket has one distance, and farther away it is wider.

learned = np.sin(np.arange(16.0))[None]
show(
    alibi=scores.alibi(scores.alibi_slopes(8)),
    both_directions=scores.relative_position(learned, 20, bidirectional=True),
    earlier_keys=scores.relative_position(learned, 20, bidirectional=False),
)

# %%
# Images and any bias
# -------------------
# The positions of `relative_position_2d` are the pixels of an image, here of 4 rows of 6, and it adds a learned number
# for each offset between two of them. `bias` adds an array.

rows, columns = np.ogrid[-3:4, -5:6]
show(
    relative_position_2d=scores.relative_position_2d(
        np.exp(-np.hypot(rows, columns) / 2)[None], 6
    ),
    bias=scores.bias(np.random.default_rng(0).standard_normal((SEQLEN, SEQLEN))),
)

plt.show()
