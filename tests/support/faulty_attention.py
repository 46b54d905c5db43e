"""A tiled attention that computes like a tensor-core kernel, and faults that such kernels have had, each by name.

Sums are float32, P and dS are rounded to the storage dtype before the second products, and tiles have 64 keys. It is
right with ``fault=None``; every other name breaks one thing, like a wrong line in a kernel. Operands have heads, and
the same leading axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.arrays import accumulator_dtype

BLOCK_KV = 64

FORWARD_FAULTS = (
    "last key dropped",
    "mask off by one",
    "padding key of zero logit",
    "key read for its neighbour",
    "o not rescaled once",
    "l not rescaled once",
    "o accumulated in storage dtype",
    "l accumulated in storage dtype",
    "logits rounded to storage dtype",
    "lse in base 2",
)
# Faults of a narrow storage dtype have no effect if the accumulator has the same dtype.
ROUNDING_FAULTS = tuple(fault for fault in FORWARD_FAULTS if "storage dtype" in fault)
GRADIENT_FAULTS = (
    "last query dropped",
    "no D term",
    "lse in base 2",
    "key seen only by the last query lost",
    "dq not scaled",
    "dlse ignored",
    "group not summed",
)


def can_serve(example: Any) -> bool:
    problem = example.problem
    return problem.has_heads and problem.q_batch == problem.k_batch == problem.v_batch


# As in a kernel, float16 may overflow and lose small numbers.
@np.errstate(over="ignore", under="ignore", invalid="ignore")
def attend(q: Any, k: Any, v: Any, *, mask: Any, scale: float, fault: str | None = None) -> tuple[Any, Any]:
    """Return o in q's dtype and lse in the accumulator's (FlashAttention-2, arXiv 2307.08691, algorithm 1)."""
    storage, wide = q.dtype, accumulator_dtype(q.dtype)
    q, k, v, allowed = _widened(q, k, v, mask, wide)
    seqlen_kv = k.shape[-2]
    if fault == "last key dropped":
        allowed = allowed & (np.arange(seqlen_kv) < seqlen_kv - 1)
    if fault == "mask off by one":
        allowed = allowed | np.roll(allowed, 1, axis=-1) & (np.arange(seqlen_kv) > 0)
    if fault == "key read for its neighbour":
        k, v = (np.concatenate([x[..., :1, :], x[..., :-1, :]], axis=-2) for x in (k, v))

    row_max = np.full((*allowed.shape[:-1], 1), -np.inf, wide)
    row_sum = np.zeros_like(row_max)
    o = np.zeros((*allowed.shape[:-1], v.shape[-1]), wide)
    for tile, start in enumerate(range(0, seqlen_kv, BLOCK_KV)):
        keys = slice(start, start + BLOCK_KV)
        s = wide.type(scale) * (q @ np.swapaxes(k[..., keys, :], -1, -2))
        if fault == "logits rounded to storage dtype":
            s = s.astype(storage).astype(wide)
        s = np.where(allowed[..., keys], s, -np.inf)
        new_max = np.maximum(row_max, s.max(axis=-1, keepdims=True, initial=-np.inf))
        shift = np.where(np.isneginf(new_max), 0, new_max)
        row_scale = np.exp(row_max - shift)
        p = np.exp(s - shift)
        if fault == "padding key of zero logit" and start + BLOCK_KV >= seqlen_kv:
            row_sum = row_sum + np.exp(-new_max) / np.where(row_scale > 0, row_scale, 1)
        o = o * (1 if fault == "o not rescaled once" and tile == 1 else row_scale)
        row_sum = row_sum * (1 if fault == "l not rescaled once" and tile == 1 else row_scale)
        o = o + p.astype(storage).astype(wide) @ v[..., keys, :]
        row_sum = row_sum + p.sum(axis=-1, keepdims=True)
        if fault == "o accumulated in storage dtype":
            o = o.astype(storage).astype(wide)
        if fault == "l accumulated in storage dtype":
            row_sum = row_sum.astype(storage).astype(wide)
        row_max = new_max

    is_empty = row_sum == 0
    lse = np.where(is_empty, -np.inf, row_max + np.log(np.where(is_empty, 1, row_sum)))[..., 0]
    if fault == "lse in base 2":
        lse = lse / np.log(wide.type(2))
    return (o / np.where(is_empty, 1, row_sum)).astype(storage), lse.astype(wide)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def pull(
    q: Any, k: Any, v: Any, do: Any, *, dlse: Any, mask: Any, scale: float, fault: str | None = None
) -> tuple[Any, Any, Any]:
    """Return dq, dk and dv in q's dtype, from the stored o and lse (FlashAttention-2, algorithm 2)."""
    o, lse = attend(q, k, v, mask=mask, scale=scale)
    storage, wide = q.dtype, accumulator_dtype(q.dtype)
    num_kv_heads, group = k.shape[-3], q.shape[-3] // k.shape[-3]
    q, k, v, allowed = _widened(q, k, v, mask, wide)
    do, o = do.astype(wide), o.astype(wide)

    s = wide.type(scale) * (q @ np.swapaxes(k, -1, -2))
    lse = np.where(np.isneginf(lse), 0, lse)[..., None]
    if fault == "lse in base 2":
        lse = lse / np.log(wide.type(2))
    p = np.exp(np.where(allowed, s - lse, -np.inf))
    d = np.sum(do * o, axis=-1, keepdims=True)
    if fault == "no D term":
        d = np.zeros_like(d)
    if dlse is not None and fault != "dlse ignored":
        d = d - dlse[..., None]
    ds = p * (do @ np.swapaxes(v, -1, -2) - d)
    p, ds = (x.astype(storage).astype(wide) for x in (p, ds))

    dq = ds @ k * wide.type(1 if fault == "dq not scaled" else scale)
    if fault == "last query dropped":
        p[..., -1, :], ds[..., -1, :] = 0, 0
    if fault == "key seen only by the last query lost":
        p[..., -1], ds[..., -1] = 0, 0
    dk, dv = np.swapaxes(ds, -1, -2) @ q * wide.type(scale), np.swapaxes(p, -1, -2) @ do
    reduce = (lambda x: x[..., 0, :, :]) if fault == "group not summed" else (lambda x: x.sum(axis=-3))
    dk, dv = (reduce(x.reshape(*x.shape[:-3], num_kv_heads, group, *x.shape[-2:])) for x in (dk, dv))
    return dq.astype(storage), dk.astype(storage), dv.astype(storage)


def _widened(q: Any, k: Any, v: Any, mask: Any, wide: Any) -> tuple[Any, Any, Any, Any]:
    """Return operands in the accumulator's dtype, with a key/value head for each query head, and the full mask."""
    group = q.shape[-3] // k.shape[-3]
    q, k, v = q.astype(wide), *(np.repeat(x.astype(wide), group, axis=-3) for x in (k, v))
    allowed = np.broadcast_to(True if mask is None else mask, (*q.shape[:-1], k.shape[-2]))
    return q, k, v, allowed
