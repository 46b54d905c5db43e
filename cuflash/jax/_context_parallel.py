"""Context parallelism inside `jax.shard_map`: `cuflash.jax.context_parallel`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import jax
import numpy as np

from ..arrays import describe
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords, require_keywords
from ..masks.places import Places
from ..masks.shape import MaskShape
from ..planning.options import CallOptions, Options
from ._entry import Memory, called

Runs = tuple[tuple[int, int], ...]


@explains_keywords
def context_parallel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    layout: str = "contiguous",
    memory: Memory = "heads_first",
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> Any:
    """Compute attention inside `jax.shard_map`, where each device has some rows of the sequence.

    Keys and values are gathered by `jax.lax.all_gather`; the transpose of that adds their gradients where the keys are.
    JAX can differentiate the call as it can `attention`.

    Parameters
    ----------
    q, k, v : jax.Array
        As in `attention`, with this device's rows only; all devices have equal numbers of rows.
    axis_name : str
        The axis of the mesh along which rows are sharded.
    layout : {"contiguous", "zigzag"}
        The rows of device r of P: chunk r of P; or the chunks r and 2 P - 1 - r of 2 P, one after the other, so that
        devices have equal work under a causal mask. The caller orders q, k and v so, and o has the same order.
    memory : {"heads_first", "tokens_first"}
        As in `attention`.
    return_lse : bool
        If True, also return lse.
    **options : optional
        Options of `attention`, except `q_start` and `kv_start`. Arrays in them are whole on every device.

    Returns
    -------
    o : jax.Array [..., num_heads, rows, value_dim]
        This device's rows of what `attention` returns for the whole sequence.
    lse : jax.Array [..., num_heads, rows]
        Only with `return_lse`.

    Raises
    ------
    TypeError, UnsupportedProblem
        For the same reasons as in `attention`, or the layout does not fit the rows.

    Examples
    --------
    >>> import jax, cuflash.jax
    >>> from jax.sharding import Mesh, PartitionSpec
    >>> mesh, rows = Mesh(jax.devices()[:1], ("rows",)), PartitionSpec(None, "rows")
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 256, 64))
    >>> def local(q, k, v):
    ...     return cuflash.jax.context_parallel(q, k, v, axis_name="rows", causal=True)
    >>> o = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows))(q, k, v)
    >>> o.shape
    (4, 256, 64)
    """
    require_keywords("context_parallel", options, CallOptions.__annotations__)
    reasons = [
        f"{name} must be left out: devices see the positions of the whole sequence; got {describe(options[name])}"
        for name in ("q_start", "kv_start") if name in options
    ]  # fmt: skip
    try:
        size = int(jax.lax.psum(1, axis_name))
    except (NameError, TypeError, ValueError) as error:
        rule = "axis_name must be the name of an axis of the mesh of jax.shard_map, within which this is called"
        raise UnsupportedProblem([*reasons, f"{rule}; got {describe(axis_name)}"]) from error
    lengths = [x.shape[-2] if np.ndim(x) > 1 else 0 for x in (q, k)]
    if layout not in ("contiguous", "zigzag"):
        reasons.append(f"layout must be 'contiguous' or 'zigzag'; got {describe(layout)}")
    elif layout == "zigzag" and any(length % 2 for length in lengths):
        rule = "layout='zigzag' needs an even number of rows on each device"
        reasons.append(f"{rule}; got {lengths[0]} and {lengths[1]}")
    refuse(reasons)
    k, v = (_in_order(jax.lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True), size, layout) for x in (k, v))
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    of_all = MaskShape(batch, q.shape[-3] if q.ndim > 2 else 1, size * lengths[0], k.shape[-2])
    calls: list[Callable[..., Any]] = []
    for rank in range(size):
        runs = runs_of(rank, size, lengths[0], layout)
        places = Places(runs[0][0], q_runs=runs if len(runs) > 1 else (), of_all=of_all)
        with_places = Options(**options, places=places)
        calls.append(partial(called, options=with_places, memory=memory, return_lse=return_lse))
    return jax.lax.switch(jax.lax.axis_index(axis_name), calls, q, k, v)


def runs_of(rank: int, size: int, rows: int, layout: str) -> Runs:
    """Return the positions first <= i < stop of a device's rows.

    >>> runs_of(0, 2, 8, "zigzag"), runs_of(1, 2, 8, "zigzag")
    (((0, 4), (12, 16)), ((4, 12),))
    """
    if layout == "contiguous":
        return ((rank * rows, rank * rows + rows),)
    chunk, late = rows // 2, 2 * size - 1 - rank
    runs = (rank * chunk, rank * chunk + chunk), (late * chunk, late * chunk + chunk)
    return runs if late > rank + 1 else ((runs[0][0], runs[1][1]),)


def _in_order(gathered: jax.Array, size: int, layout: str) -> jax.Array:
    """Return the rows of all devices in the order of the sequence."""
    if layout == "contiguous" or size == 1:
        return gathered
    rows = gathered.shape[-2] // size
    positions = [np.arange(*run) for rank in range(size) for run in runs_of(rank, size, rows, layout)]
    return gathered[..., np.argsort(np.concatenate(positions)), :]
