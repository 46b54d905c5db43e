"""
Generation with a KV cache, GQA and RoPE
========================================
A `KVCache` keeps the keys and values of earlier tokens, contiguous or paged. Two key/value heads serve eight query heads
(GQA; one would be MQA). Rotary positions (RoPE) are applied to q and k before they reach the cache.
"""

import cuflash
import matplotlib.pyplot as plt
import numpy as np


def rope(x, positions):
    """Rotate pairs of channels by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[..., None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * cos - second * sin, first * sin + second * cos], axis=-1
    )


rng = np.random.default_rng(0)
tokens, prompt = 60, 20
q = rng.standard_normal((1, 8, tokens, 16), dtype=np.float32)
k, v = rng.standard_normal((2, 1, 2, tokens, 16), dtype=np.float32)

# %%
# The prompt is appended at once, then one token at a time. The page size does not change a result.

options = {
    "batch": 1,
    "num_kv_heads": 2,
    "head_dim": 16,
    "capacity": 64,
    "dtype": np.float32,
}
for paged in ({}, {"page_size": 16, "num_pages": 4}):
    cache = cuflash.KVCache(**options, **paged)
    cache.append(rope(k[:, :, :prompt], np.arange(prompt)), v[:, :, :prompt])
    rows = [cache.attention(rope(q[:, :, :prompt], np.arange(prompt)))]
    for t in range(prompt, tokens):
        now = slice(t, t + 1)
        cache.append(rope(k[:, :, now], [t]), v[:, :, now])
        rows.append(cache.attention(rope(q[:, :, now], [t])))
    o = np.concatenate(rows, axis=-2)
    at = np.arange(tokens)
    whole = cuflash.attention(rope(q, at), rope(k, at), v, causal=True)
    name = "paged" if paged else "contiguous"
    print(f"{name}: differs from one causal call by {abs(o - whole).max():.1e}")

# %%
# Bytes of a cache
# ----------------
# Fewer key/value heads need a smaller cache, which is the reason for GQA.

_, axes = plt.subplots(figsize=(6, 3), layout="constrained")
context = np.array([1024, 4096, 16384, 65536])
for heads, name in ((64, "64 heads"), (8, "8 heads (GQA)"), (1, "1 head (MQA)")):
    size = [
        cuflash.study.kv_cache_bytes(
            num_kv_heads=heads,
            head_dim=128,
            num_layers=80,
            tokens=int(n),
            dtype="float16",
        )
        for n in context
    ]
    axes.loglog(context, np.array(size) / 2**30, "o-", label=name)
axes.set(xlabel="tokens", ylabel="GiB of a model with 80 layers")
axes.legend()
plt.show()
