"""
From a mask to blocks
=====================
Kernels skip whole blocks. `BlockIndex` shows which blocks of a mask are absent (white), partial (light) or full (dark).
"""

import matplotlib.pyplot as plt
import numpy as np
from cuflash import BlockIndex, masks

mask = masks.Causal() & (masks.SlidingWindow(150, 0) | masks.Lengths(kv=20))
figure, panels = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
for axes, block in zip(panels, (16, 32, 64, 128)):
    index = BlockIndex.from_mask(mask, 512, 512, block)
    index.plot(ax=axes)
    axes.set(
        title=f"block {block}\n{index.density:.0%} of the blocks", xticks=[], yticks=[]
    )

# %%
# Small blocks follow the mask more closely, large ones are faster per element. `report` counts both.

print(BlockIndex.from_mask(mask, 512, 512, 64).report(head_dim=64))

# %%
# Chosen blocks
# -------------
# `BlockPattern` takes a boolean per block, `ChosenBlocks` a list of key blocks per query, such as the top-k of native
# sparse attention.

rng = np.random.default_rng(0)
pattern = masks.BlockPattern(np.tri(8, dtype=bool) & (rng.random((8, 8)) < 0.5), 8)
lists = np.sort(
    rng.permuted(np.tile(np.arange(8), (1, 64, 1)), axis=-1)[..., :2], axis=-1
)
chosen = masks.Causal() & masks.ChosenBlocks(lists, 8)
figure, panels = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained")
for axes, (title, each) in zip(
    panels, {"BlockPattern": pattern, "ChosenBlocks, causal": chosen}.items()
):
    each.plot(64, ax=axes)
    axes.set(title=title, xticks=[], yticks=[])
plt.show()
