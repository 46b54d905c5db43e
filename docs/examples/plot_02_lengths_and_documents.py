"""
Masks: padding, prefixes and documents
======================================
A batch of sequences with different lengths is either padded, or packed into one array (varlen, `cu_seqlens`).
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
# `Lengths` cuts off padding. In `PrefixLM` every query attends the prefix. `Documents` takes an id per token, and
# separates documents; `Sequences` takes offsets, such as the `cu_seqlens` of FlashAttention.

documents = np.repeat([0, 1, 2], [6, 11, 7])
show(
    lengths=masks.Lengths(q=20, kv=16),
    prefix=masks.PrefixLM(8),
    documents=masks.Documents(documents),
    sequences=masks.Sequences([0, 6, 17, SEQLEN], causal=True),
)

# %%
# Combined masks
# --------------
# A document mask combines with every other mask: here packed text with a causal window, and a picture book whose pages
# attend themselves in both directions while earlier text is a prefix.

show(
    causal_documents=masks.Causal() & masks.Documents(documents),
    windows_of_documents=masks.SlidingWindow(3, 0) & masks.Documents(documents),
    causal_or_own_page=masks.Causal() | masks.Documents(documents),
)
plt.show()
