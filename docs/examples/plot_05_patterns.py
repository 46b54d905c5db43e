"""
Block-sparse patterns
=====================
The patterns of the literature in blocks: a white block is skipped, a light one is partial, a dark one is full.
`mask.plot(seqlen_q, block=block)` draws this.
"""

import matplotlib.pyplot as plt
import numpy as np
from cuflash import BlockIndex, masks, patterns

SEQLEN, BLOCK = 1024, 32


def show(**named: masks.Mask) -> None:
    """Draw one panel per pattern, with the share of the blocks that it keeps."""
    figure, panels = plt.subplots(
        1, len(named), figsize=(3 * len(named), 3.4), layout="constrained"
    )
    for axes, (title, mask) in zip(panels, named.items()):
        index = BlockIndex.from_mask(mask, SEQLEN, SEQLEN, BLOCK)
        index.plot(ax=axes)
        density = index.report(head_dim=64).density
        axes.set(title=f"{title}\n{density:.0%} of the blocks", xticks=[], yticks=[])


# %%
# Patterns of blocks are created for given lengths.

show(
    butterfly=patterns.butterfly(SEQLEN, block=BLOCK),
    bigbird=patterns.bigbird(SEQLEN, block=BLOCK),
    random=patterns.random(SEQLEN, block=BLOCK, density=0.25),
    checkerboard=patterns.checkerboard(SEQLEN, block=BLOCK),
)

# %%
# Patterns of windows and combs do not depend on lengths. They count in tokens, so that thin ones touch many blocks:
# `strided` attends few keys, but no block below the diagonal is skipped.

show(
    longformer=patterns.longformer((64, 64), 32),
    sink_local=patterns.sink_local(32, (191, 0)),
    fixed=patterns.fixed(128, 16),
    strided=patterns.strided(32),
)

# %%
# Patterns of whole blocks
# ------------------------
# `on_blocks` applies a mask to blocks instead of tokens, so that any mask becomes a pattern of whole blocks: here the comb
# of `strided`. `filled` keeps every element of each block that an index touches. `BlockPattern` takes a boolean per block.

comb = patterns.strided(4).on_blocks(BLOCK)
filled = BlockIndex.from_mask(patterns.fixed(128, 16), SEQLEN, SEQLEN, BLOCK).filled()
chosen = np.tri(SEQLEN // BLOCK, dtype=bool) & (
    np.random.default_rng(0).random((SEQLEN // BLOCK,) * 2) < 0.3
)
show(
    comb_of_blocks=comb,
    fixed_filled=filled.as_mask(),
    any_booleans=masks.BlockPattern(chosen, BLOCK),
)
plt.show()
