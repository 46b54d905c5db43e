"""
Block-sparse patterns
=====================

The patterns of the literature in blocks: a white block is skipped, a light one is partial, a dark one is full.
"""

import matplotlib.pyplot as plt
from cuflash import BlockIndex, masks, patterns
from matplotlib.colors import ListedColormap

SEQLEN, BLOCK = 1024, 32
COLOURS = ListedColormap(["white", "#2b5d8a", "#9cc3e0"])  # absent, full, partial


def show(**named: masks.Mask) -> None:
    """One panel a pattern, with the share of the blocks that it keeps."""
    figure, panels = plt.subplots(1, len(named), figsize=(3 * len(named), 3.4), layout="constrained")
    for axes, (title, mask) in zip(panels, named.items()):
        index = BlockIndex.from_mask(mask, SEQLEN, SEQLEN, BLOCK)
        axes.imshow(index.to_scipy().toarray(), cmap=COLOURS, vmin=0, vmax=2, interpolation="nearest")
        density = index.report(head_dim=64).density
        axes.set(title=f"{title}\n{density:.0%} of the blocks", xticks=[], yticks=[])


# %%
# Patterns made of blocks are drawn for given lengths.

show(
    butterfly=patterns.butterfly(SEQLEN, block=BLOCK),
    bigbird=patterns.bigbird(SEQLEN, block=BLOCK),
    random=patterns.random(SEQLEN, block=BLOCK, density=0.25),
    checkerboard=patterns.checkerboard(SEQLEN, block=BLOCK),
)

# %%
# Patterns made of windows and combs hold no lengths. They count in tokens, so that thin ones touch many blocks:
# `strided` attends few keys, and still no block below the diagonal is skipped.

show(
    longformer=patterns.longformer((64, 64), 32),
    sink_local=patterns.sink_local(32, (191, 0)),
    fixed=patterns.fixed(128, 16),
    strided=patterns.strided(32),
)

# %%
# On whole blocks
# ---------------
# `BlockPattern` takes one boolean for each block, so that any pattern can be made coarser: here the comb of `strided`,
# on blocks instead of tokens.

comb = patterns.strided(4).toarray(SEQLEN // BLOCK)
show(comb_of_tokens=patterns.strided(32), comb_of_blocks=masks.BlockPattern(comb, BLOCK))
plt.show()
