"""Context parallelism: one call of attention on the rows of several ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable
from copy import deepcopy
from typing import Unpack

from numpy.typing import DTypeLike

from ..arrays import Array, as_dtype, describe, flag_reasons, is_array, is_sparse, namespace, whole_number
from ..errors import UnsupportedProblem, collecting
from ..executors import checks
from ..keywords import explains_keywords, require_keywords
from ..masks import Mask
from ..planning.options import Options, VjpOptions
from ..plans.conversion import as_arrays
from ._agreement import fingerprint
from ._group import Group
from ._model import Machine
from ._passes import Gather, Prepared, Pullback, RankCall
from ._posed import Posed, argument_reasons


@explains_keywords
class ContextParallel:
    """One call of attention whose rows are on the ranks of a group.

    Every rank creates this object with equal arguments, and calls the same methods in the same order.

    Parameters
    ----------
    group : Group
        The group of this rank, from `run` or `group_of`.
    seqlen : int
        Number of queries of the whole sequence.
    num_heads : int
        Number of query heads.
    num_kv_heads : int, optional
        Number of key/value heads; default: `num_heads`.
    seqlen_kv : int, optional
        Number of keys, which then have their own layout. Default: the number of queries, in the same layout.
    batch : tuple of int
        Extents of the axes before the heads.
    layout : "auto", "contiguous", "zigzag" or int array
        The rank that holds each row. "auto" assigns chunks by their work under the mask, so that ranks have nearly
        equal work; "zigzag" gives rank r the chunks r and 2 size - 1 - r of 2 size chunks. An array has the rank of
        each block.
    method : "auto", "gather" or "heads"
        "gather" moves keys and values to the queries; "heads" moves rows so that each rank computes whole heads, and
        needs `num_kv_heads` to be a multiple of the number of ranks. "auto" selects the method that the cost model
        expects to be faster.
    block : int
        Number of adjacent rows that stay on one rank.
    **options : optional
        Options of `cuflash.attention`, and `wrt` of `cuflash.attention_vjp`. Arrays among them must be
        whole on every rank. Arrays of a mask are copied; later edits have no effect.

    Raises
    ------
    UnsupportedProblem
        An argument breaks its rule, or ranks pass different arguments; every rank raises it before any data moves.
    PeerLost
        Another rank raised an error, returned, or did not answer within the timeout of the group.

    Notes
    -----
    With "gather", results of a row agree with those of one device within their error bounds, and gradients of keys are
    added in the order of ranks, so that results are bitwise reproducible for equal layouts. Key/value heads are
    computed in groups, which the cost model chooses; the keys of the next group move while a group is computed.

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
        layout: str | Array = "auto",
        method: str = "auto",
        block: int = 128,
        **options: Unpack[VjpOptions],
    ) -> None:
        if not isinstance(group, Group):
            raise TypeError(f"group must be a Group, from run or group_of; got {describe(group)}")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        arguments = {
            "seqlen": seqlen, "num_heads": num_heads, "num_kv_heads": kv_heads,
            "seqlen_kv": seqlen_kv, "batch": batch, "layout": layout, "method": method, "block": block,
        }  # fmt: skip
        require_keywords("ContextParallel", options, VjpOptions.__annotations__)
        reasons = argument_reasons(arguments, group.size) + [
            f"{name} must be left out: ranks see the positions of the whole sequence; got {describe(options[name])}"
            for name in ("q_start", "kv_start") if name in options
        ]  # fmt: skip
        if options.get("sink") is not None:
            with collecting(reasons):
                options["sink"] = as_arrays({"sink": options["sink"]})["sink"]
            if not is_array(options["sink"]):
                reasons.append(f"sink must be an array of shape (num_heads,); got {describe(options['sink'])}")
        mask = options.get("mask")
        if isinstance(mask, Mask):  # the first call of each dtype reads its arrays again, and moves the same rows
            options["mask"] = mask.to(deepcopy)
        elif is_array(mask) or is_sparse(mask):
            options["mask"] = deepcopy(mask)
        if not reasons:
            with collecting(reasons):
                self._posed = Posed.of(arguments, Options(**options), group.size)
                self._posed.require_options(group._lanes.namespace)
        texts = {name: fingerprint(value) for name, value in (arguments | options).items()}
        group._perform("ContextParallel", texts, reasons)
        self._group, self._known = group, dict[Hashable, Prepared]()

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
        return self._posed.queries.of_rank[self._group.rank]

    @property
    def kv_rows(self) -> Array:
        """Positions of this rank's keys, in ascending order; equal to `rows` if keys have the layout of queries.

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
        return self._posed.keys.of_rank[self._group.rank]

    @property
    def loads(self) -> Array:
        """Number of blocks that each rank's queries attend to, over all batch entries and heads.

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
        return self._posed.costs.loads(self._posed.queries)

    def shard(self, x: Array) -> Array:
        """Return this rank's rows of an array of the whole sequence.

        Parameters
        ----------
        x : array [..., seqlen, dim]
            Its rows are queries if axis -2 has `seqlen` elements, and keys otherwise.

        Returns
        -------
        array [..., local rows, dim]
            A copy.

        Raises
        ------
        UnsupportedProblem
            The array has a different number of rows.

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
        return namespace(x).ascontiguousarray(x[..., self._rows_of(x), :])

    def _rows_of(self, x: Array) -> Array:
        """Return the positions of this rank's rows of an array of the whole sequence."""
        lengths = dict.fromkeys((self._posed.shape.seqlen_q, self._posed.shape.seqlen_kv))
        shape: tuple[int, ...] = getattr(x, "shape", ())
        if len(shape) < 2 or shape[-2] not in lengths:
            wanted = " or ".join(map(str, lengths))
            raise UnsupportedProblem([f"x must be an array with {wanted} rows (axis -2); got {describe(x)}"])
        return self.rows if shape[-2] == self._posed.shape.seqlen_q else self.kv_rows

    def unshard(self, x: Array) -> Array:
        """Collect the rows of queries of all ranks in order, on every rank.

        Parameters
        ----------
        x : array [..., local rows, dim]
            This rank's rows, such as o or dq; also dk or dv if keys have the layout of queries.

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
        group, reasons, gather = self._group, list[str](), None
        if not is_array(x) or x.ndim < 2 or x.shape[-2] != len(self.rows):
            reasons.append(f"x must have the {len(self.rows)} rows of this rank (axis -2); got {describe(x)}")
        else:
            own = namespace(x).ascontiguousarray(x).reshape(math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1])
            gather = Gather(group, {"x": own}, self._posed.queries.places)
        group._perform("unshard", {} if gather is None else {"x": _like(x)}, reasons, gather)
        assert gather is not None
        return gather.arrays["all x"].reshape(*x.shape[:-2], self._posed.shape.seqlen_q, x.shape[-1])

    # Attention.

    def attention(self, q: Array, k: Array, v: Array, *, return_lse: bool = False) -> Array | tuple[Array, Array]:
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
            This rank's rows of the result of `cuflash.attention` for the whole sequence.
        lse : array [*batch, num_heads, local rows]
            Only with `return_lse`.

        Raises
        ------
        UnsupportedProblem
            Arrays do not fit the layout or the arrays of other ranks; every rank raises it.
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
        return self.attention_vjp(q, k, v, return_lse=return_lse)[0]

    def attention_vjp(
        self, q: Array, k: Array, v: Array, *, return_lse: bool = False
    ) -> tuple[Array | tuple[Array, Array], Pullback]:
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
            of arrays that `wrt` names are whole on every rank. All ranks must call it.

        Raises
        ------
        UnsupportedProblem
            Arrays do not fit the layout or the arrays of other ranks; every rank raises it.
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
        arrays, reasons = {"q": q, "k": k, "v": v}, flag_reasons("return_lse", return_lse)
        layout = checks.is_on(), *((type(x), getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in (q, k, v))
        prepared = None if reasons else self._known.get(layout)
        if prepared is None:
            reasons += (reason for name, array in arrays.items() for reason in self._array_reasons(name, array))
            if not reasons:
                with collecting(reasons):
                    prepared = self._prepared(q, k, v)
                    self._known[layout] = prepared
        if prepared is None:
            self._group._perform("attention", {}, reasons)
        assert prepared is not None
        call = RankCall(prepared, arrays)
        self._group._perform("attention", prepared.texts, [], call)
        return ((call.o, call.lse) if return_lse else call.o), Pullback(call)

    def _array_reasons(self, name: str, array: Array) -> list[str]:
        posed, is_query = self._posed, name == "q"
        rows, heads = (self.rows, posed.shape.num_heads) if is_query else (self.kv_rows, posed.num_kv_heads)
        xp = self._group._lanes.namespace
        if type(array) is not xp.ndarray:
            kind = "NumPy" if self._group._is_on_host else "CuPy"
            return [f"{name} must be a {kind} array, as this rank computes with them; got {describe(array)}"]
        if array.ndim >= 2 and array.shape[-2] != len(rows):
            own = "cp.rows" if is_query else "cp.kv_rows"
            rule = f"{name} must have the {len(rows)} rows of this rank (axis -2); got {array.shape[-2]}"
            return [f"{rule}: pass cp.shard({name}), or the rows {own} of the whole array"]
        shape = (*posed.shape.batch, heads, len(rows))
        if array.shape[:-1] != shape:
            wanted = ", ".join(map(str, (*shape, "dim")))
            return [f"{name} must have shape ({wanted}) on this rank; got {array.shape}"]
        return []

    def _prepared(self, q: Array, k: Array, v: Array) -> Prepared:
        """Return this rank's groups of heads with their plans, for calls on arrays with these layouts."""
        rank, posed = self._group.rank, self._posed
        parts = [posed.part(rank, heads, q, k, v) for heads in posed.kv_groups(rank)]
        texts = dict(zip("qkv", map(_like, (q, k, v))))
        return Prepared(self._group, posed, parts, texts, (q.shape[-1], v.shape[-1]), q.dtype)

    # Bytes that ranks exchange

    def traffic(self, head_dim: int, value_dim: int | None = None, dtype: DTypeLike = "float32") -> dict[str, Array]:
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
            For the passes "forward" and "backward": bytes that the rank of the row receives from that of the column.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> def rank(group):
        ...     cp = ContextParallel(group, seqlen=8, num_heads=1, block=1, method="gather")
        ...     return cp.traffic(16)["forward"].tolist()
        >>> run(rank, size=2)[0]
        [[0, 512], [512, 0]]
        """
        key_dim = whole_number("head_dim", head_dim, 1)
        dims = key_dim, key_dim if value_dim is None else whole_number("value_dim", value_dim, 1)
        return self._posed.traffic(dims, as_dtype("dtype", dtype))

    def workspace_bytes(self, head_dim: int, dtype: DTypeLike = "float32") -> int:
        """Return the bytes of memory that a rank needs in addition to its own rows and results.

        Parameters
        ----------
        head_dim : int
            Elements of a row of q, k and v.
        dtype : dtype
            The dtype of q, k and v.

        Returns
        -------
        int
            With "gather", a buffer for keys and values of the largest group of heads, for their gradients, and for the
            gradients that other ranks return; two if there are several groups. With "heads", all rows of the rank's own
            heads.

        Examples
        --------
        >>> from cuflash.distributed import ContextParallel, run
        >>> def rank(group):
        ...     return ContextParallel(group, seqlen=8, num_heads=1, method="gather").workspace_bytes(16)
        >>> run(rank, size=1)
        [2048]
        """
        return self._posed.workspace_bytes(whole_number("head_dim", head_dim, 1), as_dtype("dtype", dtype))

    def explain(self, head_dim: int = 128, dtype: DTypeLike = "float16", machine: Machine | None = None) -> str:
        """Return a text about the layout, the bytes that move, and the cost model's estimates for both methods.

        Parameters
        ----------
        head_dim : int
            Elements of a row of q, k and v.
        dtype : dtype
            The dtype of q, k and v.
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
        ...     return ContextParallel(group, seqlen=8192, num_heads=32, num_kv_heads=8, causal=True).explain()
        >>> print(run(rank, size=8)[0])  # doctest: +ELLIPSIS
        ranks      8, method gather: key/value heads in groups of ...
        rows       1024 to 1024 queries in ...
        """
        if machine is not None and not isinstance(machine, Machine):
            raise UnsupportedProblem([f"machine must be a Machine or None; got {describe(machine)}"])
        dim = whole_number("head_dim", head_dim, 1)
        return self._posed.explain(dim, as_dtype("dtype", dtype), machine or Machine())


def _like(x: Array) -> str:
    return f"{x.dtype} {(*x.shape[:-2], '...', x.shape[-1])}"
