"""Checks of calls that are too large for the reference: some rows of two heads are recomputed in float64."""

from dataclasses import dataclass
from typing import Any

import cuflash
import numpy as np
from cuflash import masks

_SCORES = 2**18  # number of recomputed scores per head; the bound allocates about thirty arrays of this size


@dataclass(frozen=True, eq=False, kw_only=True)
class SpotCheck:
    """Expected results of a call on arrays [batch, heads, seqlen, head_dim] at some positions.

    Gradients are for a `do` that is nonzero only in the recomputed rows, so that dk and dv are known for all keys.

    Attributes
    ----------
    places : list of (batch entry, head)
    rows : int array
        The recomputed queries.
    do : array [batch, heads, seqlen, head_dim]
        On the host, in the dtype of q.
    exact, bounds : dict of arrays by output
        For each place: o, dq [rows, head_dim], lse [rows], dk, dv [seqlen, head_dim].
    """

    places: list[tuple[int, int]]
    rows: np.ndarray
    do: np.ndarray
    exact: dict[str, np.ndarray]
    bounds: dict[str, np.ndarray]

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, mask: masks.Mask | None, precision: str = "ieee") -> "SpotCheck":
        """Return the checks of CuPy or NumPy arrays at the first head and the last head of the batch."""
        batch, num_heads, seqlen, _ = q.shape
        places = list(dict.fromkeys([(0, 0), (batch - 1, num_heads - 1)]))  # a single place if there is one head
        rows = np.linspace(0, seqlen - 1, min(64, seqlen, max(16, _SCORES // seqlen))).astype(int)
        queries, keys, values = (np.stack([on_host(x[place]) for place in places]) for x in (q, k, v))
        queries = queries[:, rows]
        allowed = None
        if mask is not None:
            b, h = (np.array(place)[:, None, None] for place in zip(*places, strict=True))
            frame = masks.MaskShape((batch,), num_heads, seqlen, seqlen)
            allowed = mask.resolve(frame)(b, h, rows[:, None], np.arange(seqlen))
            allowed = np.broadcast_to(allowed, (len(places), len(rows), seqlen))
        do = np.zeros(q.shape, queries.dtype)
        cotangents = np.random.default_rng(0).standard_normal(queries.shape).astype(queries.dtype)
        for place, cotangent in zip(places, cotangents, strict=True):
            do[place][rows] = cotangent
        product = queries.dtype if queries.dtype.itemsize == 2 else None  # tensor cores multiply rounded operands
        exact = cuflash.reference.attention(queries, keys, values, mask=allowed)
        exact += cuflash.reference.attention_vjp(queries, keys, values, cotangents, mask=allowed)
        options = {"mask": allowed, "precision": precision, "product_dtype": product}
        bounds = cuflash.error_bound(queries, keys, values, cotangents, **options)
        names = ("o", "lse", "dq", "dk", "dv")
        return cls(
            places=places, rows=rows, do=do, exact=dict(zip(names, exact, strict=True)),
            bounds={name: getattr(bounds, name) for name in names},
        )  # fmt: skip

    def share(self, **results: Any) -> float:
        """Return the largest ratio of an error of the named results to its bound; more than 1 is wrong.

        Raises
        ------
        TypeError
            There is no result to check.
        """
        if not results:
            raise TypeError(f"give at least one of {', '.join(self.exact)}: nothing would be compared")
        shares = [0.0]
        for name, result in results.items():
            for place, exact, bound in zip(self.places, self.exact[name], self.bounds[name], strict=True):
                actual = on_host(result[place])
                shares.append(share_of_bound(actual if name in ("dk", "dv") else actual[self.rows], exact, bound))
        return max(shares)


def on_host(x: Any) -> np.ndarray:
    """Convert a NumPy, CuPy or PyTorch array to NumPy; PyTorch tensors to float64, which holds all their dtypes."""
    if isinstance(x, np.ndarray):
        return x
    return x.get() if hasattr(x, "get") else x.detach().double().cpu().numpy()


def share_of_bound(first: Any, second: Any, bound: Any) -> float:
    """Return the largest |first - second| / bound.

    The ratio is infinite if one element is NaN or infinite and the other is different.

    Raises
    ------
    ValueError
        The arrays differ in shape.
    """
    wide, other = (np.asarray(x).astype(np.float64) for x in (first, second))
    if wide.shape != other.shape:
        raise ValueError(f"results must have the shape {other.shape}; got {wide.shape}")
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(wide == other, 0.0, np.abs(wide - other) / bound)
    return float(np.where(np.isnan(share), np.inf, share).max(initial=0.0))
