"""Context parallelism: one call of attention on the rows of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Unpack

import numpy as np

from ..arrays import Array, ShapeDtype, accumulator_dtype, describe, is_array, is_int
from ..blocks.work_list import requested_mask
from ..calls._call import planned
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from ..masks.places import Places
from ..masks.shape import MaskShape, count_reasons
from ..planning.options import Options, VjpOptions
from ..planning.plan_cache import plan_for
from ..plans import Gradients, Plan
from . import _model
from ._agreement import disagreement, fingerprint
from ._group import Group
from ._layout import Costs, Rows, block_reasons, dealt
from ._model import METHODS, Machine
from ._schedule import ADD, ATTEND, COPY, NUM_BUFFERS, Step, exchanging_heads, gathering, head_groups

__all__ = ["ContextParallel"]

_QUERIES = ("q", "o", "do", "dq")  # arrays with rows of queries; those of others are keys


class _Part(NamedTuple):
    """A group of heads of this rank's call: key/value heads, query heads, the plan, and the arrays for it by name."""

    kv_heads: slice
    heads: slice
    plan: Plan
    operands: dict[str, Array]


@explains_keywords
class ContextParallel:
    """One call of attention whose rows are on the ranks of a group.

    Every rank makes this object with equal arguments, and calls the same methods in the same order.

    Parameters
    ----------
    group : Group
        The group of this rank, from `run`.
    seqlen : int
        Queries of the whole sequence.
    num_heads : int
        Query heads.
    num_kv_heads : int, optional
        Key/value heads; default: `num_heads`.
    seqlen_kv : int, optional
        Keys, which then have a layout of their own. Default: there are as many keys as queries, in the same layout.
    batch : tuple of int
        Extents of the axes before the heads.
    layout : "auto", "contiguous", "zigzag" or int array
        Which rank holds which rows. "auto" deals chunks by their work under the mask, so that ranks have equal work;
        "zigzag" gives rank r the chunks r and 2 size - 1 - r of 2 size chunks. An array has the rank of each block.
    method : "auto", "gather" or "heads"
        "gather" moves keys and values to the queries; "heads" moves rows so that each rank computes whole heads, and
        needs `num_kv_heads` to be a multiple of the ranks. "auto" takes the method that moves fewer bytes.
    block : int
        Rows that stay together in a layout.
    **options : optional
        Options of `cuflash.attention`, and `wrt` of `cuflash.attention_vjp`. Arrays in them are whole on every rank.

    Raises
    ------
    UnsupportedProblem
        An argument breaks its rule, or ranks pass different arguments; every rank raises it, before anything moves.
    PeerLost
        Another rank raised, returned, or did not answer within the timeout of the group.

    Notes
    -----
    With "gather", results of a row agree with those of one device within their error bounds, and gradients of keys are
    added in the order of ranks, so that all bits repeat for equal layouts. Groups of 1, 1, 2, 2, ... key/value heads
    follow each other, and the keys of the next group move while one is computed.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 256, 32), dtype=np.float32)
    >>> def rank(group):
    ...     cp = distributed.ContextParallel(group, seqlen=256, num_heads=4, causal=True, block=16)
    ...     o, vjp = cp.attention_vjp(cp.shard(q), cp.shard(k), cp.shard(v))
    ...     dq, dk, dv = vjp(np.ones_like(o))
    ...     return cp.unshard(o)
    >>> o, _ = distributed.run(rank, size=2)
    >>> o.shape
    (4, 256, 32)
    """

    def __init__(
        self,
        group: Group,
        *,
        seqlen: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        seqlen_kv: int | None = None,
        batch: tuple[int, ...] = (),
        layout: Any = "auto",
        method: str = "auto",
        block: int = 128,
        **options: Unpack[VjpOptions],
    ) -> None:
        if not isinstance(group, Group):
            raise TypeError(f"group must be a Group, which run passes to each rank; got {describe(group)}")
        self._group, self.method, self.block = group, method, block
        keys, kv_heads = seqlen if seqlen_kv is None else seqlen_kv, num_heads if num_kv_heads is None else num_kv_heads
        arguments = dict(seqlen=seqlen, num_heads=num_heads, num_kv_heads=kv_heads, seqlen_kv=keys, batch=batch)
        arguments |= dict(layout=layout, method=method, block=block, **options)
        reasons = _argument_reasons(arguments, group.size)
        texts = {name: fingerprint(value) for name, value in arguments.items()}
        if not reasons:
            with collecting(reasons):
                self._pose(arguments, dict(options), seqlen_kv is None)
        _agree(group, "ContextParallel", texts, reasons)

    def _pose(self, arguments: Mapping[str, Any], options: dict[str, Any], is_self: bool) -> None:
        self._options, group = Options(**options), self._group
        self._num_kv_heads = int(arguments["num_kv_heads"])
        self._shape = MaskShape(*(arguments[name] for name in ("batch", "num_heads", "seqlen", "seqlen_kv")))
        self._mask = requested_mask(
            self._options.mask, self._options.causal, self._options.window, self._shape, None
        )
        self._costs = Costs.of(self._mask, self._shape, self.block)
        self._queries = dealt(arguments["layout"], self._costs.work, self._shape.seqlen_q, self.block, group.size)
        self._keys = self._queries
        if not is_self:
            even = np.ones(-(-self._shape.seqlen_kv // self.block), np.int64)
            self._keys = dealt("contiguous", even, self._shape.seqlen_kv, self.block, group.size)
        if self.method == "auto":
            fits = self._num_kv_heads % group.size == 0
            sizes = {each: self._model_bytes(each) for each in METHODS if each == "gather" or fits}
            self.method = min(sizes, key=lambda each: sizes[each])
        self._parts = dict[Any, list[_Part]]()

    # The layout.

    @property
    def rows(self) -> Array:
        """Positions of this rank's queries, in ascending order.

        Returns
        -------
        int array [local rows]
            Ascending.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> run(lambda group: ContextParallel(group, seqlen=4, num_heads=1, causal=True, block=1).rows.tolist(), size=2)
        [[0, 3], [1, 2]]
        """
        return self._queries.of_rank[self._group.rank]

    @property
    def kv_rows(self) -> Array:
        """Positions of this rank's keys, in ascending order; those of its queries if both have one layout.

        Returns
        -------
        int array [local rows]
            Ascending.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> run(lambda group: ContextParallel(group, seqlen=2, seqlen_kv=4, num_heads=1).kv_rows.tolist(), size=1)
        [[0, 1, 2, 3]]
        """
        return self._keys.of_rank[self._group.rank]

    @property
    def loads(self) -> Array:
        """Blocks of the mask that each rank's queries attend, over all batch entries and heads.

        Returns
        -------
        float array [ranks]
            In the order of ranks.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> run(lambda group: ContextParallel(group, seqlen=4, num_heads=1, causal=True, block=1).loads, size=2)[0]
        array([5., 5.])
        """
        return self._costs.loads(self._queries)

    def shard(self, x: Array) -> Array:
        """Return this rank's rows of an array of the whole sequence.

        Parameters
        ----------
        x : array [..., seqlen, dim]
            Rows are those of queries if the axis before the last has `seqlen` elements, else those of keys.

        Returns
        -------
        array [..., local rows, dim]
            A copy.

        Raises
        ------
        UnsupportedProblem
            The array has another number of rows.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.distributed import ContextParallel, run
        >>> x = np.arange(4.0)[None, :, None]
        >>> def rank(group):
        ...     return ContextParallel(group, seqlen=4, num_heads=1, causal=True, block=1).shard(x).ravel().tolist()
        >>> run(rank, size=2)
        [[0.0, 3.0], [1.0, 2.0]]
        """
        lengths = dict.fromkeys((self._shape.seqlen_q, self._shape.seqlen_kv))
        if not is_array(x) or x.ndim < 2 or x.shape[-2] not in lengths:
            wanted = " or ".join(map(str, lengths))
            raise UnsupportedProblem([f"x must be an array with {wanted} rows (axis -2); got {describe(x)}"])
        rows = self.rows if x.shape[-2] == self._shape.seqlen_q else self.kv_rows
        return np.ascontiguousarray(x[..., rows, :])

    def unshard(self, x: Array) -> Array:
        """Return all rows of an array of which each rank has its own rows of queries, in order, on every rank.

        Parameters
        ----------
        x : array [..., local rows, dim]
            Such as o or dq; of dk and dv if keys have the layout of queries.

        Returns
        -------
        array [..., seqlen, dim]
            A new array.

        Raises
        ------
        UnsupportedProblem
            An array does not have the rows of its rank.
        PeerLost
            Another rank is lost.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.distributed import ContextParallel, run
        >>> x = np.arange(4.0)[None, :, None]
        >>> def rank(group):
        ...     cp = ContextParallel(group, seqlen=4, num_heads=1, causal=True, block=1)
        ...     return cp.unshard(cp.shard(x)).ravel().tolist()
        >>> run(rank, size=2)
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
        """
        group, reasons = self._group, list[str]()
        if not is_array(x) or x.ndim < 2 or x.shape[-2] != len(self.rows):
            reasons.append(f"x must have the {len(self.rows)} rows of this rank (axis -2); got {describe(x)}")
        parts = _agree(group, "unshard", {} if reasons else {"x's dtype and other axes": _like(x)}, reasons, x)
        whole = np.empty((*x.shape[:-2], self._shape.seqlen_q, x.shape[-1]), x.dtype)
        for rows, part in zip(self._queries.of_rank, parts):
            whole[..., rows, :] = part
        group.exchange("the end of unshard", None)  # no rank may change its rows before all have copied them
        return whole

    # Attention.

    def attention(self, q: Array, k: Array, v: Array, *, return_lse: bool = False) -> Any:
        """Compute attention of this rank's queries to the keys of all ranks.

        Parameters
        ----------
        q : array [*batch, num_heads, local rows, head_dim]
            This rank's queries, as `shard` returns them.
        k, v : array [*batch, num_kv_heads, local rows, head_dim or value_dim]
            This rank's keys and values.
        return_lse : bool
            If True, also return lse.

        Returns
        -------
        o : array [*batch, num_heads, local rows, value_dim]
            Rows of what `cuflash.attention` returns for the whole sequence.
        lse : array [*batch, num_heads, local rows]
            Only with `return_lse`.

        Raises
        ------
        UnsupportedProblem
            Arrays do not fit the layout, or those of other ranks; every rank raises it.
        PeerLost
            Another rank is lost.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> from cuflash import distributed
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 16))
        >>> def rank(group):
        ...     cp = distributed.ContextParallel(group, seqlen=64, num_heads=2, causal=True, block=8)
        ...     return cp.unshard(cp.attention(cp.shard(q), cp.shard(k), cp.shard(v)))
        >>> bool(np.allclose(distributed.run(rank, size=3)[1], cuflash.attention(q, k, v, causal=True)))
        True
        """
        call = self._start("attention", q, k, v)
        return (call.o, call.lse) if return_lse else call.o

    def attention_vjp(self, q: Array, k: Array, v: Array, *, return_lse: bool = False) -> tuple[Any, _Vjp]:
        """Compute attention, and return it with the function that pulls gradients back through it.

        Parameters
        ----------
        q, k, v : arrays
            As in `attention`. They must be unchanged until the function has been called.
        return_lse : bool
            If True, return (o, lse) instead of o.

        Returns
        -------
        o : array, or pair (o, lse)
            As `attention` returns them.
        vjp : callable (do, dlse=None) -> Gradients
            Takes this rank's rows of the gradients of o and lse. Returns this rank's rows of dq, dk and dv; gradients
            of arrays that `wrt` names are whole on every rank. All ranks call it.

        Raises
        ------
        UnsupportedProblem
            Arrays do not fit the layout, or those of other ranks; every rank raises it.
        PeerLost
            Another rank is lost.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash import distributed
        >>> x = np.ones((1, 8, 4), np.float32)
        >>> def rank(group):
        ...     cp = distributed.ContextParallel(group, seqlen=8, num_heads=1, block=2)
        ...     o, vjp = cp.attention_vjp(cp.shard(x), cp.shard(x), cp.shard(x))
        ...     return vjp(o).dv.shape
        >>> distributed.run(rank, size=2)
        [(1, 4, 4), (1, 4, 4)]
        """
        call = self._start("attention", q, k, v)
        return ((call.o, call.lse) if return_lse else call.o), _Vjp(self, call)

    def _start(self, what: str, q: Array, k: Array, v: Array) -> _Call:
        """Check the arrays of all ranks, and run the forward pass."""
        group, reasons = self._group, list[str]()
        arrays = {"q": q, "k": k, "v": v}
        for name, array in arrays.items():
            reasons += self._array_reasons(name, array)
        parts = list[_Part]()
        if not reasons:
            with collecting(reasons):
                parts = self._planned(q, k, v)
        texts = {} if reasons else {name: f"array {_like(array)}" for name, array in arrays.items()}
        shared = _Shared(**arrays)
        call = _Call(self, parts, _agree(group, what, texts, reasons, shared), shared)
        call.forward()
        return call

    def _array_reasons(self, name: str, array: Any) -> list[str]:
        is_query = name in _QUERIES
        rows, heads = self.rows if is_query else self.kv_rows, self._shape.num_heads
        heads = heads if is_query else self._num_kv_heads
        shape = (*self._shape.batch, heads, len(rows))
        if not is_array(array) or type(array) is not np.ndarray:
            return [f"{name} must be a NumPy array; got {describe(array)}"]
        if array.ndim > 2 and array.shape[-2] != len(rows):
            fix = "make it by shard(), or take rows of the global array at cp.rows" + "" if is_query else ""
            return [f"{name} has {array.shape[-2]} rows here and this rank's layout has {len(rows)}: {fix or _FIX}"]
        if array.shape[:-1] != shape:
            return [f"{name} must have shape {(*shape, 'dim')} on this rank; got {array.shape}"]
        return []

    # Plans.

    def _planned(self, q: Array, k: Array, v: Array) -> list[_Part]:
        """Return the groups of heads of this rank with their plans, which later calls on like arrays reuse."""
        key = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype
        if key not in self._parts:
            self._parts[key] = [self._part(heads, q, k, v) for heads in self._kv_groups]
        return self._parts[key]

    @cached_property
    def _kv_groups(self) -> tuple[tuple[int, int], ...]:
        """The key/value heads of each group that this rank computes."""
        if self.method == "gather":
            return head_groups(self._num_kv_heads)
        own = self._num_kv_heads // self._group.size
        return ((self._group.rank * own, (self._group.rank + 1) * own),)

    def _part(self, kv_heads: tuple[int, int], q: Array, k: Array, v: Array) -> _Part:
        first, stop = kv_heads
        ratio = self._shape.num_heads // self._num_kv_heads
        heads, whole = slice(first * ratio, stop * ratio), self._shape
        runs = self._queries.runs(self._group.rank) if self.method == "gather" else ((0, whole.seqlen_q),)
        num_queries = sum(end - start for start, end in runs)
        start = runs[0][0] if runs else 0
        places = Places(start, 0, 0, heads.start, runs if len(runs) > 1 else (), whole)
        batch, operands = whole.batch, dict[str, Array]()
        options = self._options._replace(places=places)
        if (sink := options.sink) is not None and np.shape(sink)[-1:] == (whole.num_heads,):
            options = options._replace(sink=np.asarray(sink)[..., heads])
        if options.sink is not None:
            operands["sink"] = np.asarray(options.sink)
        shapes = [
            ShapeDtype((*batch, count, rows, x.shape[-1]), x.dtype)
            for x, count, rows in (
                (q, heads.stop - heads.start, num_queries),
                (k, stop - first, whole.seqlen_kv), (v, stop - first, whole.seqlen_kv),
            )
        ]  # fmt: skip
        ready = planned(*shapes, options)
        if self.method == "gather":
            inner = ready._plan
            problem = replace(inner.problem, wide_gradients=True)
            kernel = None if ready.executor == "cpu" else options.kernel
            plan = plan_for(problem, inner.mask, inner.device, kernel, bool(options.deterministic))
            ready = replace(ready, _plan=plan)
        return _Part(slice(first, stop), heads, ready, operands)

    # The model.

    @cached_property
    def _kept_scores(self) -> float:
        heads = self._shape.num_batch * self._shape.num_heads
        blocks = float(self._costs.work.sum()) / self._index_heads * heads
        return min(blocks * self.block**2, float(heads * self._shape.seqlen_q * self._shape.seqlen_kv))

    @property
    def _index_heads(self) -> int:
        return self._shape.num_batch * self._shape.num_heads

    def _model_shape(self, head_dim: int = 128, itemsize: int = 2) -> _model.Shape:
        shape, loads = self._shape, self.loads
        imbalance = float(loads.max() / loads.mean()) if loads.sum() else 1.0
        rows = shape.num_batch * shape.seqlen_kv
        return _model.Shape(
            self._group.size, rows, shape.num_heads, self._num_kv_heads, head_dim, itemsize, self._kept_scores, imbalance
        )

    def _model_bytes(self, method: str) -> float:
        return sum(_model.received(self._model_shape(), method, backward=backward) for backward in (False, True))

    def traffic(self, head_dim: int, value_dim: int | None = None, dtype: Any = "float32") -> dict[str, Array]:
        """Return the bytes that ranks receive from each other, counted from the steps of both passes.

        Parameters
        ----------
        head_dim : int
            Elements of a row of q and k.
        value_dim : int, optional
            Elements of a row of v; default: `head_dim`.
        dtype : dtype
            The dtype of q, k and v.

        Returns
        -------
        dict of int arrays [ranks, ranks]
            For the passes "forward" and "backward": what the rank of the row receives from the rank of the column.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> def rank(group):
        ...     cp = ContextParallel(group, seqlen=8, num_heads=1, block=1, method="gather")
        ...     return cp.traffic(16)["forward"].tolist()
        >>> run(rank, size=2)[0]
        [[0, 512], [512, 0]]
        """
        value_dim = head_dim if value_dim is None else value_dim
        item, wide = np.dtype(dtype).itemsize, accumulator_dtype(np.dtype(dtype)).itemsize
        size, both = self._group.size, head_dim + value_dim
        matrices = {name: np.zeros((size, size), np.int64) for name in ("forward", "backward")}
        for rank in range(size):
            for source in set(range(size)) - {rank}:
                if self.method == "gather":
                    rows = len(self._moved(rank, source)) * self._num_kv_heads * self._shape.num_batch
                    matrices["forward"][rank, source] += rows * both * item
                    matrices["backward"][rank, source] += rows * both * item
                    matrices["backward"][source, rank] += rows * both * wide
                    continue
                queries, keys = (len(each.of_rank[source]) for each in (self._queries, self._keys))
                own_q, own_kv = (count // size for count in (self._shape.num_heads, self._num_kv_heads))
                moved = self._shape.num_batch * np.array((queries * own_q, keys * own_kv))
                of_lse = moved[0] * wide
                matrices["forward"][rank, source] += moved @ (head_dim, both) * item
                matrices["forward"][source, rank] += moved[0] * value_dim * item + of_lse
                matrices["backward"][rank, source] += moved[0] * value_dim * item + of_lse
                matrices["backward"][source, rank] += moved @ (head_dim, both) * item
        return matrices

    @property
    def workspace_bytes(self) -> Any:
        """The function (head_dim, dtype) that returns the memory of a rank besides its own rows and results, in bytes.

        Returns
        -------
        callable (head_dim, dtype) -> int
            Two buffers of keys and values of the largest group of heads, and two of their gradients.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> def rank(group):
        ...     return ContextParallel(group, seqlen=8, num_heads=1, method="gather").workspace_bytes(16, "float32")
        >>> run(rank, size=1)
        [4096]
        """
        return partial(_workspace_bytes, self)

    def explain(self, head_dim: int = 128, dtype: Any = "float16", machine: Machine | None = None) -> str:
        """Return a text about the layout, the bytes that move, and what the cost model expects of both methods.

        Parameters
        ----------
        head_dim : int
            Elements of a row of q, k and v.
        dtype : dtype
            Their dtype.
        machine : Machine, optional
            Rates of devices and links; default: those of an H200 with NVLink.

        Returns
        -------
        str
            Lines of text.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> def rank(group):
        ...     return ContextParallel(group, seqlen=65536, num_heads=32, num_kv_heads=8, causal=True).explain()
        >>> print(run(rank, size=8)[0])  # doctest: +ELLIPSIS
        ranks      8, method heads: 4 query heads and 1 key/value heads on each
        ...
        """
        machine, item = machine or Machine(), np.dtype(dtype).itemsize
        shape, size = self._model_shape(head_dim, item), self._group.size
        received = {name: int(each.sum(axis=1).max()) for name, each in self.traffic(head_dim, None, dtype).items()}
        heads = "heads in groups of " + ", ".join(str(stop - first) for first, stop in self._kv_groups)
        if self.method == "heads":
            own = self._shape.num_heads // size, self._num_kv_heads // size
            heads = f"{own[0]} query heads and {own[1]} key/value heads on each"
        counts = [len(rows) for rows in self._queries.of_rank]
        runs = [len(self._queries.runs(rank)) for rank in range(size)]
        lines = [
            f"ranks      {size}, method {self.method}: {heads}",
            f"rows       {min(counts)} to {max(counts)} queries in {min(runs)} to {max(runs)} runs, block {self.block}",
            f"work       {shape.imbalance:.3f} of the mean on the rank with most",
            f"bytes      {received['forward']} forward, {received['backward']} backward, received by the rank with most",
            f"workspace  {_workspace_bytes(self, head_dim, dtype)} bytes",
        ]
        for method in METHODS:
            for name in ("forward", "backward"):
                each = _model.estimate(shape, method, machine, backward=name == "backward")
                lines.append(
                    f"model      {method} {name}: {each.compute * 1e3:.3g} ms of products, {each.exchange * 1e3:.3g} ms of "
                    f"exchange, {each.efficiency:.3f} of linear speed if none of it is hidden"
                )
        return "\n".join(lines)

    # What moves.

    def _moved(self, rank: int, source: int) -> Array:
        """Return the positions of the keys of a source that a rank needs."""
        cached = self._moved_rows.get((rank, source))
        if cached is None:
            needed, rows = self._costs.needed(self._queries, self._keys, rank), self._keys.of_rank[source]
            cached = self._moved_rows[rank, source] = rows[needed[rows]]
        return cached

    @cached_property
    def _moved_rows(self) -> dict[tuple[int, int], Array]:
        return {}

    @cached_property
    def _steps(self) -> dict[str, tuple[Step, ...]]:
        """The steps of both passes."""
        size = self._group.size
        if self.method == "heads":
            rows = self._queries.of_rank, self._keys.of_rank
            steps = exchanging_heads(size, lambda rank: bool(len(rows[0][rank]) or len(rows[1][rank])))
            return {"forward": steps, "backward": steps}
        needs = [[bool(len(self._moved(rank, source))) for source in range(size)] for rank in range(size)]
        num_groups = len(self._kv_groups)
        return {
            name: gathering(size, num_groups, lambda rank, source: needs[rank][source], returns=name == "backward")
            for name in ("forward", "backward")
        }


_FIX = "make it by shard(), or take rows of the global array at cp.kv_rows"


def _workspace_bytes(parallel: ContextParallel, head_dim: int, dtype: Any) -> int:
    shape, element = parallel._shape, np.dtype(dtype)
    heads = max((stop - first for first, stop in parallel._kv_groups), default=0)
    count = shape.num_batch * heads * shape.seqlen_kv * 2 * head_dim
    if parallel.method == "heads":
        of_queries = shape.num_batch * (shape.num_heads // parallel._group.size) * shape.seqlen_q * head_dim
        return (2 * count + 4 * of_queries) * element.itemsize
    return NUM_BUFFERS * count * (element.itemsize + accumulator_dtype(element).itemsize)


def _like(x: Array) -> str:
    return f"{x.dtype} {(*x.shape[:-2], '...', x.shape[-1])}"


def _argument_reasons(arguments: Mapping[str, Any], size: int) -> list[str]:
    counts = {name: arguments[name] for name in ("seqlen", "num_heads", "num_kv_heads", "seqlen_kv")}
    reasons = count_reasons(**counts) + block_reasons(arguments["block"])
    heads, kv_heads, method = (arguments[name] for name in ("num_heads", "num_kv_heads", "method"))
    if not (isinstance(method, str) and method in ("auto", *METHODS)):
        reasons.append(f"method must be 'auto', 'gather' or 'heads'; got {describe(method)}")
    if not (is_int(heads) and is_int(kv_heads) and kv_heads > 0 and heads % kv_heads == 0):
        reasons.append(f"num_heads must be a multiple of num_kv_heads; got {describe(heads)} and {describe(kv_heads)}")
    elif isinstance(method, str) and method == "heads" and kv_heads % size:
        reasons.append(
            f"method='heads' needs num_kv_heads ({kv_heads}) to be a multiple of the {size} ranks: use method='gather'"
        )
    return reasons


def _agree(group: Group, what: str, texts: Mapping[str, str], reasons: list[str], value: Any = None) -> list[Any]:
    """Return what all ranks pass as `value`, if none has reasons to refuse the call and their texts are equal.

    Raises
    ------
    UnsupportedProblem
        The reasons of all ranks, or the first difference; every rank raises it.
    """
    answers = group.exchange(what, (reasons, texts, value))
    of_ranks = [list(each) for each, _, _ in answers]
    if any(of_ranks):
        is_common = all(each == of_ranks[0] for each in of_ranks)
        refuse(of_ranks[0] if is_common else [f"rank {r}: {each}" for r, own in enumerate(of_ranks) for each in own])
    refuse(disagreement([each for _, each, _ in answers]))
    return [each for _, _, each in answers]


class _Shared:
    """The arrays of one rank's call that other ranks read."""

    def __init__(self, q: Array, k: Array, v: Array) -> None:
        self.arrays = {"q": q, "k": k, "v": v}
        self.parts = dict[tuple[str, int], Array]()  # results of a group of heads, by name and group


@dataclass(eq=False)
class _Call:
    """One call on this rank: what all ranks share, and what the backward pass reads again."""

    parallel: ContextParallel
    parts: list[_Part]
    ranks: list[_Shared]
    own: _Shared

    def __post_init__(self) -> None:
        q, v = self.own.arrays["q"], self.own.arrays["v"]
        self.o = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        self.lse = np.full(q.shape[:-1], -np.inf, accumulator_dtype(q.dtype))
        self.buffers = dict[tuple[str, int], Array]()

    @property
    def rank(self) -> int:
        return self.parallel._group.rank

    def perform(self, name: str, act: Any) -> None:
        """Do this rank's steps of a pass; its number is new on all ranks."""
        number, _ = self.parallel._group._exchanged(f"the {name} pass", None)
        self.parallel._group._perform(number, f"the {name} pass", self.parallel._steps[name], act)

    def forward(self) -> None:
        self.perform("forward", self._forward_gather if self.parallel.method == "gather" else self._forward_heads)

    # Gathering keys.

    def _buffer(self, name: str, group: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return one of the buffers that groups take in turn."""
        turn = name, group % NUM_BUFFERS
        buffer = self.buffers.get(turn)
        if buffer is None or buffer.shape[-3] < shape[-3]:
            buffer = self.buffers[turn] = np.zeros(shape, dtype)
        return buffer[..., : shape[-3], :, :]

    def _keys(self, name: str, group: int) -> Array:
        """Return the buffer for the keys, or values, of a group of heads; rows that are not needed are never attended."""
        local, part = self.own.arrays[name], self.parts[group]
        heads = part.kv_heads.stop - part.kv_heads.start
        shape = (*local.shape[:-3], heads, self.parallel._shape.seqlen_kv, local.shape[-1])
        return self._buffer(name, group, shape, local.dtype)

    def _copy(self, step: Step) -> None:
        rows, heads = self.parallel._moved(step.rank, step.source), self.parts[step.group].kv_heads
        local = self.parallel._keys.local(step.source, rows)
        for name in "kv":
            source = self.ranks[step.source].arrays[name]
            self._keys(name, step.group)[..., rows, :] = source[..., heads, :, :][..., local, :]

    def _forward_gather(self, step: Step) -> None:
        if step.kind == COPY:
            self._copy(step)
            return
        part, q = self.parts[step.group], self.own.arrays["q"]
        k, v = (self._keys(name, step.group) for name in "kv")
        o, lse = part.plan.forward(np.ascontiguousarray(q[..., part.heads, :, :]), k, v, **part.operands)
        self.o[..., part.heads, :, :], self.lse[..., part.heads, :] = o, lse

    # Exchanging heads.

    def _forward_heads(self, step: Step) -> None:
        part, whole = self.parts[0], self.parallel._shape
        if step.kind == COPY:
            for name, heads in (("q", part.heads), ("k", part.kv_heads), ("v", part.kv_heads)):
                self._copy_rows(name, name, heads, step.source)
        elif step.kind == ATTEND:
            arrays = (self._all_rows(name, name) for name in "qkv")
            self.own.parts["o", 0], self.own.parts["lse", 0] = part.plan.forward(*arrays, **part.operands)
        else:
            own = whole.num_heads // self.parallel._group.size
            heads, rows = slice(step.source * own, (step.source + 1) * own), self.parallel.rows
            self.o[..., heads, :, :] = self.ranks[step.source].parts["o", 0][..., rows, :]
            self.lse[..., heads, :] = self.ranks[step.source].parts["lse", 0][..., rows]

    def _all_rows(self, name: str, like: str) -> Array:
        """Return the array of all rows of this rank's own heads."""
        part, whole, local = self.parts[0], self.parallel._shape, self.own.arrays[like]
        heads, rows = (part.heads, whole.seqlen_q) if name in _QUERIES else (part.kv_heads, whole.seqlen_kv)
        if (name, 0) not in self.buffers:
            shape = (*local.shape[:-3], heads.stop - heads.start, rows, local.shape[-1])
            self.buffers[name, 0] = np.zeros(shape, local.dtype)
        return self.buffers[name, 0]

    def _copy_rows(self, name: str, like: str, heads: slice, source: int) -> None:
        layout: Rows = self.parallel._queries if name in _QUERIES else self.parallel._keys
        self._all_rows(name, like)[..., layout.of_rank[source], :] = self.ranks[source].arrays[name][..., heads, :, :]


class _Vjp:
    """The function that pulls gradients back through one call on all ranks; `attention_vjp` returns it."""

    def __init__(self, parallel: ContextParallel, call: _Call) -> None:
        self._parallel, self._call = parallel, call

    def __call__(self, do: Array, dlse: Array | None = None) -> Gradients:
        """Return this rank's rows of the gradients of sum(do * o) + sum(dlse * lse) over all ranks.

        Raises
        ------
        UnsupportedProblem
            An argument does not match o or lse, or what other ranks pass; every rank raises it.
        PeerLost
            Another rank is lost.
        """
        parallel, call = self._parallel, self._call
        reasons = _like_reasons("do", do, call.o) + ([] if dlse is None else _like_reasons("dlse", dlse, call.lse))
        texts = {} if reasons else {"dlse": str(dlse is not None)}
        _agree(parallel._group, "vjp", texts, reasons)
        call.own.arrays["do"] = do
        if dlse is not None:
            call.own.arrays["dlse"] = dlse[..., None]
        backward = _Backward(call)
        call.perform("backward", backward.gather if parallel.method == "gather" else backward.heads)
        names = [each.name for each in call.parts[0].plan._plan.problem.operands] if call.parts else []
        wrt = [name for name in names if name in backward.others]
        parts = parallel._group.exchange("the gradients of other arrays", {name: backward.others[name] for name in wrt})
        others = {name: _in_order([each[name] for each in parts]) for name in wrt}
        return Gradients(backward.dq, backward.dk, backward.dv, others)


def _like_reasons(name: str, array: Any, like: Array) -> list[str]:
    if type(array) is np.ndarray and array.shape == like.shape and array.dtype == like.dtype:
        return []
    return [f"{name} must be a NumPy array of shape {like.shape} and dtype {like.dtype}; got {describe(array)}"]


def _in_order(parts: list[Array]) -> Array:
    """Return the sum of arrays, added in the order of ranks and rounded once."""
    dtype = parts[0].dtype
    total = parts[0].astype(accumulator_dtype(dtype))
    for part in parts[1:]:
        total += part
    return total.astype(dtype)


class _Backward:
    """The backward pass of one call on this rank."""

    def __init__(self, call: _Call) -> None:
        self.call, arrays = call, call.own.arrays
        self.dq, self.dk, self.dv = (np.zeros_like(arrays[name]) for name in "qkv")
        self.others = dict[str, Array]()
        self.taken = dict[tuple[str, int, int], Array]()

    def _gradients(self, part: _Part, arrays: tuple[Array, ...], dlse: Array | None) -> Gradients:
        gradients = part.plan.backward(*map(np.ascontiguousarray, arrays), dlse=dlse, **part.operands)
        for name, each in gradients.others.items():
            whole = self._whole_sink(part, each) if name == "sink" else each
            wide = whole.astype(accumulator_dtype(whole.dtype))
            self.others[name] = self.others[name] + wide if name in self.others else wide
        return gradients

    def _whole_sink(self, part: _Part, dsink: Array) -> Array:
        sink = np.asarray(self.call.parallel._options.sink)
        if dsink.shape == sink.shape:
            return dsink
        whole = np.zeros(sink.shape, dsink.dtype)
        whole[..., part.heads] = dsink
        return whole

    def gather(self, step: Step) -> None:
        """Do a step of the pass that gathers keys again, and adds their gradients where the keys are."""
        call, group = self.call, step.group
        part, arrays = call.parts[group], call.own.arrays
        if step.kind == COPY:
            call._copy(step)
        elif step.kind == ATTEND:
            own = [arrays[name][..., part.heads, :, :] for name in ("do", "q")]
            o, lse = call.o[..., part.heads, :, :], call.lse[..., part.heads, :]
            dlse = arrays["dlse"][..., part.heads, :, 0] if "dlse" in arrays else None
            k, v = (call._keys(name, group) for name in "kv")
            gradients = self._gradients(part, (own[0], own[1], k, v, o, lse), dlse)
            self.dq[..., part.heads, :, :] = gradients.dq
            for name, each in (("dk", gradients.dk), ("dv", gradients.dv)):
                buffer = call._buffer(name, group, each.shape, each.dtype)
                buffer[...] = each
                call.own.parts[name, group] = buffer
        elif step.kind == ADD:
            self._add(group)
        else:
            rows = call.parallel._moved(step.source, step.rank)
            for name in ("dk", "dv"):
                self.taken[name, step.source, group] = call.ranks[step.source].parts[name, group][..., rows, :]

    def _add(self, group: int) -> None:
        """Add the gradients of this rank's keys that ranks computed, in the order of ranks."""
        parallel, part, rank = self.call.parallel, self.call.parts[group], self.call.rank
        for name, total in (("dk", self.dk), ("dv", self.dv)):
            own = total[..., part.kv_heads, :, :]
            sums = np.zeros(own.shape, accumulator_dtype(total.dtype))
            for source in range(parallel._group.size):
                terms = self.taken.pop((name, source, group), None)
                if terms is not None:
                    sums[..., parallel._keys.local(rank, parallel._moved(source, rank)), :] += terms
            own[...] = sums

    def heads(self, step: Step) -> None:
        """Do a step of the pass in which this rank has all rows of its heads."""
        call, part = self.call, self.call.parts[0]
        if step.kind == COPY:
            call._copy_rows("do", "do", part.heads, step.source)
            if "dlse" in call.own.arrays:
                self._copy_dlse(step.source)
        elif step.kind == ATTEND:
            do, q, k, v = (call._all_rows(name, name) for name in ("do", "q", "k", "v"))
            dlse = call.buffers["dlse", 0] if "dlse" in call.own.arrays else None
            gradients = self._gradients(part, (do, q, k, v, call.own.parts["o", 0], call.own.parts["lse", 0]), dlse)
            call.own.parts |= {("dq", 0): gradients.dq, ("dk", 0): gradients.dk, ("dv", 0): gradients.dv}
        else:
            whole, size = call.parallel._shape, call.parallel._group.size
            own, own_kv = whole.num_heads // size, call.parallel._num_kv_heads // size
            parts, source = call.ranks[step.source].parts, step.source
            heads, kv_heads = (slice(source * n, (source + 1) * n) for n in (own, own_kv))
            self.dq[..., heads, :, :] = parts["dq", 0][..., call.parallel.rows, :]
            self.dk[..., kv_heads, :, :] = parts["dk", 0][..., call.parallel.kv_rows, :]
            self.dv[..., kv_heads, :, :] = parts["dv", 0][..., call.parallel.kv_rows, :]

    def _copy_dlse(self, source: int) -> None:
        call, heads = self.call, self.call.parts[0].heads
        theirs = call.ranks[source].arrays["dlse"][..., heads, :, 0]
        whole = call.buffers.setdefault(
            ("dlse", 0), np.zeros((*theirs.shape[:-1], call.parallel._shape.seqlen_q), theirs.dtype)
        )
        whole[..., call.parallel._queries.of_rank[source]] = theirs
