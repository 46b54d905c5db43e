"""Hypothesis strategies for attention, which draw the structure of an example and a seed for its numbers.

They draw the properties that trigger bugs (lengths near a multiple of the tile, groups of heads, masks with empty rows,
views with unusual strides, magnitudes of values), so that an example shrinks to the smallest shape and the simplest
mask. `examples` combines all strategies, which can also be used alone.

>>> from hypothesis import given
>>> @given(examples())
... def test_shapes(example):
...     o, lse = my_attention(example.q, example.k, example.v, example.dense_mask, example.scale)
...     assert o.shape[:-1] == lse.shape == example.q.shape[:-1]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..arrays import DTYPES, Array, accumulator_dtype, describe, flag_reasons, int_reasons, is_int
from ..dropout import Dropout
from ..errors import refuse
from ..keywords import explains_keywords
from ..masks.arrays import Dense
from ..masks.base import Mask
from ..masks.shape import MaskShape
from ..scores import Score
from .assertions import Example, on_lattice
from .formulas import Formula, formulas
from .mask_strategies import masks, shared
from .memory_layouts import LAYOUTS, laid_out
from .source_text import source_text

DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES)
HEAD_DIMS = (1, 2, 3, 7, 8, 16, 17, 32, 40, 59, 64, 80, 96, 111, 128, 256)
PRIMES = (1, 2, 3, 5, 7, 13, 31, 61, 127)
GROUPS = (1, 2, 3, 7, 8)
SCALES = (1.0, 0.5, -0.5, 1e-3, 10.0, 100.0, 1e4)
VALUES = ("normal", "lattice", "constant", "outliers", "small", "large", "rising")
SHORT = 40  # the longest sequence, in tokens, of a third of the examples, which may have many heads instead
LOW = 2000  # a difference of scores for which exp(-LOW) is 0 in float64
NON_FINITE = ("nan", "inf", "-inf")


# Sizes


def lengths(tile: int = 64, longest: int = 260) -> st.SearchStrategy[int]:
    """Return a strategy for sequence lengths: primes, and lengths near multiples of the tile.

    The latter are a multiple plus 0, 1, -1, 2 or half a tile, and include 0 and 1. Half of them exceed four tiles, if
    `longest` allows this.
    """
    extra = st.sampled_from((0, 1, -1, 2, tile // 2))
    numbers = [st.integers(0, 4)] + [st.integers(5, longest // tile)] * (longest >= 5 * tile)
    around = [st.builds(lambda tiles, extra: tiles * tile + extra, number, extra) for number in numbers]
    primes = st.sampled_from([prime for prime in PRIMES if prime <= longest])
    return st.one_of(primes, *(each.map(lambda length: min(max(length, 0), longest)) for each in around))


def heads(most: int = 24, groups: Sequence[int] = GROUPS) -> st.SearchStrategy[tuple[int, int]]:
    """Return a strategy for (num_heads, num_kv_heads), with groups of 1, 2, 3, 7 or 8 query heads.

    Most often, several key/value heads with several query heads each are drawn.
    """
    pairs = [(kv * group, kv) for group in groups for kv in (1, 2, 3) if kv * group <= max(most, 1)]
    several = [pair for pair in pairs if pair[0] > pair[1] > 1]
    return st.sampled_from(pairs + several)


def head_dims(widest: int = 256) -> st.SearchStrategy[int]:
    """Return a strategy for head_dim and value_dim: powers of two, numbers next to them, and common sizes of models."""
    return st.sampled_from([dim for dim in HEAD_DIMS if dim <= widest])


def scales() -> st.SearchStrategy[float | None]:
    """Return a strategy for the scale: half of the time None (1 / sqrt(head_dim)), otherwise -0.5 or 1e-3 to 1e4."""
    return st.none() | st.sampled_from(SCALES)


# Memory layouts


def layouts() -> st.SearchStrategy[str]:
    """Return a strategy for names of memory layouts, see `laid_out`."""
    return st.sampled_from(LAYOUTS)


# Examples

Masks = st.SearchStrategy[Mask | None] | Callable[[MaskShape], st.SearchStrategy[Mask | None]]


@explains_keywords
@dataclass(frozen=True, kw_only=True, repr=False)
class Structure:
    """The parameters that determine an example, which `Structure(...).example()` returns.

    Parameters
    ----------
    q_batch, k_batch, v_batch : tuple of int
        Batch axes of q, k and v, which broadcast.
    num_heads, num_kv_heads : int
        Numbers of query heads and of key/value heads; both are 1 if `has_heads` is False.
    has_heads : bool
        True if operands have an axis of heads; otherwise they are 2-D.
    seqlen_q, seqlen_kv : int
        Lengths in tokens.
    head_dim, value_dim : int
        Lengths of the last axis of q and k, and of the last axis of v.
    dtype : str
        Name of the operands' dtype.
    mask : Mask or None
        As in `cuflash.attention`.
    scale : float or None
        As in `cuflash.attention`.
    layouts : tuple of str
        Memory layouts of q, k, v, do and dlse; see `laid_out`.
    values : str
        Distribution of the values: "normal", "lattice" (integers -2..2), "constant" (all elements of an operand are
        equal), "outliers" (one element in 50 is 10 times as large), "small" (1e-3 times normal), "large" (v and do are
        100 times normal), "rising" (the magnitudes of k and of the scores grow from key to key).
    has_dlse : bool
        True if there is a dlse; otherwise it is None.
    seed : int
        Seed of the values.
    sink : tuple of int, or None
        The shape of a sink, which broadcasts to (*batch, num_heads).
    sink_dtype : str
        Name of the sink's dtype.
    non_finite : tuple of (operand, position, value)
        Elements that are not finite: the name of the operand (q, k, v, do or dlse), the position of the element in C
        order, modulo the number of elements, and "nan", "inf" or "-inf".
    score : Formula, optional
        A score function, whose real arrays all have gradients.
    dropout : Dropout, optional
        The dropout of weights.
    has_low_rows : bool
        True if the scores of every other query, starting with the first, are lower by 2000 or more, so that exp gives 0
        unless the softmax subtracts the maximum of the row. The first columns of q and k are set to achieve this.

    Examples
    --------
    >>> from cuflash.masks import Causal
    >>> example = Structure(num_heads=4, num_kv_heads=2, seqlen_q=5, seqlen_kv=7, mask=Causal("bottom_right")).example()
    >>> example.q.shape, example.k.shape, example.q.dtype
    ((4, 5, 8), (2, 7, 8), dtype('float32'))
    """

    q_batch: tuple[int, ...] = ()
    k_batch: tuple[int, ...] = ()
    v_batch: tuple[int, ...] = ()
    num_heads: int = 1
    num_kv_heads: int = 1
    has_heads: bool = True
    seqlen_q: int = 1
    seqlen_kv: int = 1
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    mask: Mask | None = None
    scale: float | None = None
    layouts: tuple[str, ...] = ("contiguous",) * 5
    values: str = "normal"
    has_dlse: bool = True
    seed: int = 0
    sink: tuple[int, ...] | None = None
    sink_dtype: str = "float32"
    non_finite: tuple[tuple[str, int, str], ...] = ()
    score: Formula | None = None
    dropout: Dropout | None = None
    has_low_rows: bool = False

    @property
    def mask_shape(self) -> MaskShape:
        """The shape for which `mask` is resolved.

        Examples
        --------
        >>> Structure(q_batch=(2, 1), k_batch=(3,), seqlen_q=4, seqlen_kv=5).mask_shape
        MaskShape(batch=(2, 3), num_heads=1, seqlen_q=4, seqlen_kv=5)
        """
        batch = np.broadcast_shapes(self.q_batch, self.k_batch, self.v_batch)
        return MaskShape(batch, self.num_heads, self.seqlen_q, self.seqlen_kv)

    def __repr__(self) -> str:
        """Return Python source with the fields that differ from their defaults; see `source_text`."""
        changed = [
            f"{each.name}={source_text(getattr(self, each.name))}"
            for each in fields(self)
            if not _same_value(getattr(self, each.name), each.default)
        ]
        return f"Structure({', '.join(changed)})"

    def example(self) -> Example:
        """Return the example, whose operands are filled by a random generator with `seed`.

        Returns
        -------
        Example
            The operands; their exact results and bounds are computed on first use.

        Examples
        --------
        >>> Structure(seqlen_q=3, seqlen_kv=5).example().k.shape
        (1, 5, 8)
        """
        rng = np.random.default_rng(self.seed)
        heads_q, heads_kv = ((self.num_heads,), (self.num_kv_heads,)) if self.has_heads else ((), ())
        batch = self.mask_shape.batch if self.has_heads else ()
        shapes = {
            "q": (*self.q_batch, *heads_q, self.seqlen_q, self.head_dim),
            "k": (*self.k_batch, *heads_kv, self.seqlen_kv, self.head_dim),
            "v": (*self.v_batch, *heads_kv, self.seqlen_kv, self.value_dim),
            "do": (*batch, *heads_q, self.seqlen_q, self.value_dim),
            "dlse": (*batch, *heads_q, self.seqlen_q, 1),
        }
        dtype = np.dtype(self.dtype)
        operands: dict[str, Array] = {}
        for (name, shape), layout in zip(shapes.items(), self.layouts):
            kind = accumulator_dtype(dtype) if name == "dlse" else dtype
            filled = _filled(rng, name, shape, self.values)
            if self.has_low_rows and name in "qk":
                filled[..., 0] = self._lowering(name)
            filled = filled.astype(kind)
            for operand, position, value in self.non_finite:
                if operand == name and filled.size:
                    filled.flat[position % filled.size] = float(value)
            operands[name] = laid_out(filled, layout)
        dlse = operands.pop("dlse")[..., 0] if self.has_dlse else None
        sink = None if self.sink is None else 3 * rng.standard_normal(self.sink)
        score = None
        if self.score is not None:
            arrays = self.score.arrays(self.mask_shape, self.seed, accumulator_dtype(dtype))
            score = Score(self.score, **arrays)
        return Example(
            q=operands["q"],
            k=operands["k"],
            v=operands["v"],
            do=operands["do"],
            dlse=dlse,
            sink=None if sink is None else np.asarray(sink).astype(self.sink_dtype),
            mask=self.mask,
            scale=self.scale,
            score=score,
            dropout=self.dropout,
            wrt=() if score is None else tuple(each.name for each in score.program.arrays if each.kind == "real"),
            origin=f"{self!r}.example()",
        )

    def _lowering(self, name: str) -> np.ndarray | float:
        """Return integers for the first column of q or k, whose scaled products are at most -LOW in every other row."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        size = math.ceil(math.sqrt(LOW / abs(scale)))
        return size * (np.arange(self.seqlen_q) % 2 == 0) if name == "q" else -math.copysign(size, scale)


def _same_value(value: object, default: object) -> bool:
    return value is default if isinstance(value, Mask) else value == default


def _filled(rng: np.random.Generator, name: str, shape: tuple[int, ...], values: str) -> Array:
    drawn = rng.standard_normal(shape)
    if values == "lattice":
        return on_lattice(drawn)
    if values == "constant":
        return np.full(shape, drawn.flat[0] if drawn.size else 0.0)
    if values == "outliers":
        return drawn * np.where(rng.random(shape) < 0.02, 10, 1)
    if values == "small":
        return 1e-3 * drawn
    if values == "large":
        return 100 * drawn if name in ("v", "do") else drawn
    if values == "rising":
        return drawn * np.linspace(0.1, 8, shape[-2])[:, None] if name == "k" else drawn
    return drawn


@explains_keywords
def structures(
    *,
    tile: int = 64,
    dtypes: Sequence[str] = DTYPE_NAMES,
    most_scores: int = 1 << 16,
    most_rows: int = 1200,
    max_leaves: int = 3,
    widest: int = 256,
    longest: int = 260,
    has_non_finite: bool = False,
    has_sink: bool = False,
    has_score: bool = False,
    has_dropout: bool = False,
    batch: Sequence[tuple[int, ...]] | None = None,
    grouped_heads: bool = True,
    layouts: Sequence[str] = LAYOUTS,
    empty_rows: bool = True,
    masks: Masks | None = None,
    sink_dtypes: Sequence[str] | None = None,
    broadcast_sinks: bool = True,
) -> st.SearchStrategy[Structure]:
    """Return a strategy for `Structure` objects, which describe an example with a seed instead of numbers.

    Parameters
    ----------
    tile, dtypes, most_scores, most_rows, max_leaves, widest, longest : optional
        As in `examples`.
    has_non_finite, has_sink, has_score, has_dropout : bool
        As in `examples`.
    batch, grouped_heads, layouts, empty_rows, masks, sink_dtypes, broadcast_sinks : optional
        As in `examples`.

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        A strategy that draws a `Structure`, whose `example()` returns the arrays.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(structures(most_scores=1000, longest=30))
    ... def test(structure):
    ...     assert structure.num_heads * structure.seqlen_q * structure.seqlen_kv <= 1000
    >>> test()
    """
    limits = SimpleNamespace(**locals())  # all parameters by name
    refuse(_limit_reasons(limits))
    return _structures(limits)


def _limit_reasons(limits: SimpleNamespace) -> list[str]:
    """Return why arguments of `structures`, by name, are refused."""
    counts = ("tile", "most_scores", "most_rows", "max_leaves", "widest", "longest")
    reasons = int_reasons(1, **{name: getattr(limits, name) for name in counts})
    reasons += _dtype_reasons("dtypes", limits.dtypes)
    reasons += [] if limits.sink_dtypes is None else _dtype_reasons("sink_dtypes", limits.sink_dtypes)
    for name in (
        "has_non_finite", "has_sink", "has_score", "has_dropout", "broadcast_sinks", "grouped_heads", "empty_rows",
    ):  # fmt: skip
        reasons += flag_reasons(name, getattr(limits, name))
    reasons += _batch_reasons(limits.batch) + _layout_reasons(limits.layouts)
    is_strategy = limits.masks is None or isinstance(limits.masks, st.SearchStrategy) or callable(limits.masks)
    if not is_strategy or isinstance(limits.masks, Mask):
        reasons.append(
            f"masks must be a strategy for masks, or a function of a MaskShape that returns one; got "
            f"{describe(limits.masks)}: use hypothesis.strategies.just(mask), or none() to draw no mask"
        )
    return reasons


def _dtype_reasons(argument: str, dtypes: Sequence[str]) -> list[str]:
    names = dtypes if isinstance(dtypes, (tuple, list)) else ()
    if names and all(isinstance(name, str) and name in DTYPE_NAMES for name in names):
        return []
    all_names = [_dtype_name(each) for each in (dtypes if isinstance(dtypes, (tuple, list)) else [dtypes])]
    meant = [name for name in all_names if name in DTYPE_NAMES]
    fix = [name for name in meant if name not in names] or ["float32"]
    shown = f"[{', '.join(map(repr, dtypes))}]" if isinstance(dtypes, list) and len(dtypes) <= 4 else describe(dtypes)
    return [
        f"{argument} must be a sequence of names among {', '.join(DTYPE_NAMES)}; got {shown}: "
        f"write {', '.join(map(repr, fix))}, as in {argument}={meant or fix}"
    ]


def _dtype_name(value: Any) -> str:
    """Return the name of a dtype, or of a value that NumPy converts to a dtype, or "" for any other value."""
    try:
        return "" if value is None else np.dtype(value).name
    except Exception:  # np.dtype may run code of the value's class
        return ""


def _batch_reasons(batch: Sequence[tuple[int, ...]] | None) -> list[str]:
    axes = batch if isinstance(batch, (tuple, list)) else (None,)
    known = all(isinstance(each, tuple) and all(is_int(extent) and extent >= 0 for extent in each) for each in axes)
    if batch is None or (axes and known):
        return []
    rule = "batch must be a sequence of tuples of ints, the batch axes to draw from"
    return [f"{rule}; got {describe(batch)}: use [(2,)], for example"]


def _layout_reasons(layouts: Sequence[str]) -> list[str]:
    if isinstance(layouts, (tuple, list)) and layouts and set(layouts) <= set(LAYOUTS):
        return []
    return [f"layouts must be a sequence of names among {', '.join(LAYOUTS)}; got {describe(layouts)}"]


@st.composite
def _structures(draw: st.DrawFn, limits: SimpleNamespace) -> Structure:
    longest = min(limits.longest, draw(shared(st.sampled_from, (limits.longest, limits.longest, SHORT))))
    seqlen_q, seqlen_kv = draw(shared(st.tuples, *[shared(lengths, limits.tile, longest)] * 2))
    seqlen_kv = seqlen_q if draw(st.booleans()) else seqlen_kv
    seqlen_kv = seqlen_kv if limits.empty_rows else max(1, seqlen_kv)
    room = min(limits.most_scores // max(1, seqlen_q * seqlen_kv), limits.most_rows // max(1, seqlen_q))
    has_heads, num_heads, num_kv_heads, batches = draw(_axes(limits, room))
    shape = MaskShape(np.broadcast_shapes(*batches), num_heads, seqlen_q, seqlen_kv)
    widest = min(limits.widest, 256 if seqlen_q * num_heads <= 512 else 64)
    dtype = draw(shared(st.sampled_from, tuple(limits.dtypes)))
    sink, sink_dtype = None, "float32"
    if limits.has_sink:
        sink, sink_dtype = draw(sinks(shape, dtype, limits.sink_dtypes, limits.broadcast_sinks))
    return Structure(
        q_batch=batches[0],
        k_batch=batches[1],
        v_batch=batches[2],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        has_heads=has_heads,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=draw(shared(head_dims, widest)),
        value_dim=draw(shared(head_dims, widest)),
        dtype=dtype,
        mask=draw(_masks(limits, shape)),
        scale=draw(shared(scales)),
        layouts=draw(shared(_layouts, tuple(limits.layouts))),
        values=draw(shared(st.sampled_from, VALUES)),
        has_dlse=draw(st.booleans()),
        seed=draw(shared(st.integers, 0, 2**32 - 1)),
        sink=sink,
        sink_dtype=sink_dtype,
        non_finite=draw(shared(_non_finite)) if limits.has_non_finite else (),
        score=draw(shared(formulas)) if limits.has_score else None,
        dropout=draw(shared(dropouts)) if limits.has_dropout else None,
        has_low_rows=draw(shared(st.sampled_from, (False, False, True))),
    )


@st.composite
def _axes(draw: st.DrawFn, limits: SimpleNamespace, room: int) -> tuple[bool, int, int, tuple[tuple[int, ...], ...]]:
    """Draw whether there are heads, their numbers, and batch axes; all batch entries together have <= `room` heads."""
    groups = GROUPS if limits.grouped_heads else (1,)
    if limits.batch is not None:
        fitting = [axes for axes in limits.batch if math.prod(axes) <= room] or [min(limits.batch, key=math.prod)]
        axes = draw(st.sampled_from(fitting))
        return True, *draw(shared(heads, room // max(1, math.prod(axes)), groups)), (axes,) * 3
    if not draw(shared(st.sampled_from, (True, True, True, False))):
        return False, 1, 1, ((), (), ())
    num_heads, num_kv_heads = draw(shared(heads, room, groups))
    return True, num_heads, num_kv_heads, draw(shared(_leading_axes, min(room // num_heads, 4)))


@st.composite
def _masks(draw: st.DrawFn, limits: SimpleNamespace, shape: MaskShape) -> Mask | None:
    """Draw a mask within the limits; if empty rows are not allowed, such rows attend all keys instead."""
    if limits.masks is None:
        is_masked = draw(shared(st.sampled_from, (False, True, True, True)))
        mask = draw(masks(shape, limits.max_leaves)) if is_masked else None
    else:
        mask = draw(limits.masks if isinstance(limits.masks, st.SearchStrategy) else limits.masks(shape))
    if mask is None or limits.empty_rows:
        return mask
    is_empty = ~mask.toarray(shape.seqlen_q, shape.seqlen_kv, batch=shape.batch, num_heads=shape.num_heads).any(axis=-1)
    return mask | Dense(is_empty[..., None]) if is_empty.any() else mask


def _layouts(names: Sequence[str]) -> st.SearchStrategy[tuple[str, ...]]:
    """Return a strategy for layouts of five operands, which are all contiguous half of the time, if that is allowed."""
    contiguous = [st.just(("contiguous",) * 5)] if "contiguous" in names else []
    return st.one_of(*contiguous, st.tuples(*[st.sampled_from(tuple(names))] * 5))


def dropouts() -> st.SearchStrategy[Dropout]:
    """Return a strategy for dropouts, including the ends of the ranges of probabilities, seeds and offsets."""
    probabilities = st.sampled_from((0, 2.0**-8, 0.1, 0.5, 1 - 2.0**-8)) | st.floats(2.0**-8, 0.9)
    seeds = st.sampled_from((0, 2**64 - 1)) | st.integers(0, 2**64 - 1)
    offsets = st.sampled_from((0, 2**32 - 1)) | st.integers(0, 2**32 - 1)
    return st.builds(Dropout, probabilities, seeds, offsets)


@st.composite
def sinks(
    draw: st.DrawFn, shape: MaskShape, dtype: str, dtypes: Sequence[str] | None = None, broadcasts: bool = True
) -> tuple[tuple[int, ...], str]:
    """Draw shape and dtype of a sink for q with a dtype: one logit per head, per head and batch entry, or shared."""
    full = (*shape.batch, shape.num_heads)
    num_axes = draw(shared(st.integers, 0, len(full)))
    stretched = draw(shared(st.tuples, *[st.booleans()] * num_axes))
    sink = tuple(1 if is_one else extent for extent, is_one in zip(full[len(full) - num_axes :], stretched))
    names = (DTYPE_NAMES if dtype == "float64" else DTYPE_NAMES[:-1]) if dtypes is None else tuple(dtypes)
    of_heads = st.just(full[-1:])
    return draw(of_heads | st.just(sink) if broadcasts else of_heads), draw(shared(st.sampled_from, names))


def _non_finite() -> st.SearchStrategy[tuple[tuple[str, int, str], ...]]:
    """Return a strategy for one to three elements that are not finite: operand, position and value."""
    one = st.tuples(
        st.sampled_from(("q", "k", "v", "do", "dlse")), st.integers(0, 2**16), st.sampled_from(NON_FINITE)
    )
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def _leading_axes(room: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Return a strategy for batch axes of q, k and v with at most `room` entries, including no axes and empty ones."""
    plain = [(), (1,), (0,)] + [(2,)] * (room >= 2) + [(3,)] * (room >= 3) + [(2, 2)] * (room >= 4)
    stretched: list[tuple[tuple[int, ...], ...]] = [((2,), (1,), (1,)), ((1,), (2,), (2,)), ((2,), (2,), ())] * (
        room >= 2
    )
    stretched += [((2, 1), (2,), (1, 2))] * (room >= 4)
    return st.sampled_from([(axes,) * 3 for axes in plain] + stretched)


@explains_keywords
def examples(
    *,
    tile: int = 64,
    dtypes: Sequence[str] = DTYPE_NAMES,
    most_scores: int = 1 << 16,
    most_rows: int = 1200,
    max_leaves: int = 3,
    widest: int = 256,
    longest: int = 260,
    has_non_finite: bool = False,
    has_sink: bool = False,
    has_score: bool = False,
    has_dropout: bool = False,
    batch: Sequence[tuple[int, ...]] | None = None,
    grouped_heads: bool = True,
    layouts: Sequence[str] = LAYOUTS,
    empty_rows: bool = True,
    masks: Masks | None = None,
    sink_dtypes: Sequence[str] | None = None,
    broadcast_sinks: bool = True,
) -> st.SearchStrategy[Example]:
    """Return a strategy for `Example` objects of every structure; see `structures`.

    Parameters
    ----------
    tile : int
        Tile size of the implementation in tokens; many lengths are near its multiples.
    dtypes : sequence of str
        Names of the dtypes to draw from.
    most_scores, most_rows : int
        Upper limits of batch x heads x seqlen_q x seqlen_kv, and of batch x heads x seqlen_q.
    max_leaves : int
        How many masks may be combined into one.
    widest : int
        Upper limit of head_dim and value_dim.
    longest : int
        Upper limit of the sequence lengths in tokens.
    has_non_finite : bool
        True to set one to three elements of the operands to NaN or infinity.
    has_sink : bool
        True to draw a sink, within `sink_dtypes` and `broadcast_sinks`.
    has_score : bool
        True to draw a score function with captured arrays.
    has_dropout : bool
        True to draw dropout.
    batch : sequence of tuple of int, optional
        Batch axes to draw from, which q, k and v share; the smallest tuple is used if every other exceeds the limits.
        For example, [(1,), (3,)] makes all operands four-dimensional. Default: any axes, including axes that broadcast
        and operands with two dimensions.
    grouped_heads : bool
        True if there may be fewer key/value heads than query heads.
    layouts : sequence of str
        Memory layouts to draw from; ["contiguous"] draws no views.
    empty_rows : bool
        True if queries may attend no key. Otherwise there is at least one key, and a query that attends no key under
        the drawn mask attends all keys.
    masks : strategy for masks, or function of a MaskShape that returns one, optional
        Masks to draw from; ``hypothesis.strategies.none()`` draws no mask. Default: masks of every kind, or no mask.
    sink_dtypes : sequence of str, optional
        Names of the dtypes of sinks. Default: every dtype that a call accepts with the dtype of q.
    broadcast_sinks : bool
        True if a sink may have any shape that broadcasts to (*batch, num_heads); otherwise its shape is (num_heads,).

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        A strategy that draws an `Example`. The repr of the example is Python source that recreates it, with the names
        `np`, `cuflash`, `masks`, `testing` and `Structure`.

    Raises
    ------
    UnsupportedProblem
        An argument is invalid. The error lists every reason.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(examples(dtypes=["float32"], longest=20))
    ... def test(example):
    ...     assert example.q.dtype == "float32" and example.q.shape[-2] <= 20
    >>> test()
    """
    return structures(**locals()).map(Structure.example)  # all parameters by name
