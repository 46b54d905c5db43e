"""
Packed sequences (varlen)
=========================
`pack` joins sequences of unequal lengths into one array, without padding, and `masks.Sequences` separates them. Offsets
are the `cu_seqlens` of FlashAttention.
"""

from timeit import timeit

import cuflash
import matplotlib.pyplot as plt
import numpy as np
from cuflash import masks

rng = np.random.default_rng(0)
lengths = [300, 20, 150, 40, 500, 14]
sequences = [
    rng.standard_normal((4, length, 32), dtype=np.float32) for length in lengths
]
packed, offsets = cuflash.pack(sequences)
mask = masks.Sequences(offsets, causal=True)
o = cuflash.attention(packed, packed, packed, mask=mask)
alone = [cuflash.attention(x, x, x, causal=True) for x in sequences]
print(
    all(np.allclose(a, b, atol=1e-5) for a, b in zip(cuflash.unpack(o, offsets), alone))
)

# %%
# The mask in blocks: only the blocks on the diagonal are visited.

index = cuflash.BlockIndex.from_mask(mask, sum(lengths), sum(lengths), 32)
_, axes = plt.subplots(figsize=(4, 4), layout="constrained")
index.plot(ax=axes)
axes.set(title=f"{index.density:.0%} of the blocks", xticks=[], yticks=[])

# %%
# Packed or padded?
# -----------------

padded = np.zeros((len(lengths), 4, max(lengths), 32), np.float32)
for row, x in zip(padded, sequences):
    row[:, : x.shape[1]] = x
calls = {
    "packed": lambda: cuflash.attention(packed, packed, packed, mask=mask),
    "padded": lambda: cuflash.attention(
        padded, padded, padded, mask=masks.Causal() & masks.Lengths(kv=lengths)
    ),
    "one by one": lambda: [cuflash.attention(x, x, x, causal=True) for x in sequences],
}
_, axes = plt.subplots(figsize=(5, 2), layout="constrained")
axes.barh(
    list(calls),
    [min(timeit(call, number=1) for _ in range(5)) * 1e3 for call in calls.values()],
)
axes.set(xlabel="ms")
plt.show()
