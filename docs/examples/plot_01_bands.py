"""
Masks: bands around the diagonal
================================
A mask says which keys (columns) each query (row) attends. `mask.plot(seqlen_q, seqlen_kv)` draws it with matplotlib:
dark elements are attended. `mask.picture` prints it as text, and notebooks display masks automatically.
"""

import matplotlib.pyplot as plt
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
# `Causal` is what decoders use. `SlidingWindow(left, right)` counts keys on either side of the diagonal; the query itself
# is always attended. `Dilated` keeps every `step`-th key of a window.

show(
    causal=masks.Causal(),
    window=masks.SlidingWindow(5, 0),
    both_sides=masks.SlidingWindow(3, 3),
    dilated=masks.Dilated(3, None, 0),
)

# %%
# Unequal lengths
# ---------------
# If there are fewer queries than keys, as in decoding, the diagonal can be aligned in two ways: `align="bottom_right"` aligns the
# last query with the last key, `"top_left"` the first query with the first key. `Band` takes the two bounds of key - query.

figure, panels = plt.subplots(1, 3, figsize=(9, 2.2), layout="constrained")
for axes, align in zip(panels, ("top_left", "bottom_right")):
    masks.Causal(align).plot(8, SEQLEN, ax=axes)
    axes.set(title=f"Causal({align!r})", xticks=[], yticks=[])
masks.Band(4, 9).plot(8, SEQLEN, ax=panels[2])
panels[2].set(title="Band(4, 9)", xticks=[], yticks=[])
plt.show()
