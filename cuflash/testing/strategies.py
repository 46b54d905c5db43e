"""Hypothesis strategies for attention: structure is drawn, the numbers follow from a seed.

What is drawn is what faults hide in (lengths off a tile, groups of heads, masks with empty rows, views with odd
strides, magnitudes), so that an example shrinks towards the smallest shape and the plainest mask. `examples` puts it
all together; the parts serve alone.

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
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..arrays import DTYPES, Array, accumulator_dtype, describe, flag_reasons, is_int, whole_number
from ..dropout import Dropout
from ..errors import collecting, refuse
from ..keywords import explains_keywords
from ..masks.arrays import Dense
from ..masks.base import Mask
from ..masks.shape import MaskShape
from ..scores import Score
from .assertions import Example, on_lattice
from .formulas import Formula, formulas
from . import mask_strategies
from .mask_strategies import INTEGER_KINDS, INTEGER_TYPES, as_kind, masks
from .memory_layouts import LAYOUTS, laid_out
from .source_text import source_text

__all__ = [
    "HEAD_DIMS",
    "INTEGER_KINDS",
    "INTEGER_TYPES",
    "LAYOUTS",
    "VALUES",
    "Structure",
    "as_kind",
    "dropouts",
    "examples",
    "formulas",
    "head_dims",
    "heads",
    "laid_out",
    "layouts",
    "lengths",
    "masks",
    "scales",
    "sinks",
    "structures",
]

DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES)
HEAD_DIMS = (1, 2, 3, 7, 8, 16, 17, 32, 40, 59, 64, 80, 96, 111, 128, 256)
PRIMES = (1, 2, 3, 5, 7, 13, 31, 61, 127)
GROUPS = (1, 2, 3, 7, 8)
SCALES = (1.0, 0.5, -0.5, 1e-3, 10.0, 100.0, 1e4)
VALUES = ("normal", "lattice", "constant", "outliers", "small", "large", "rising")
SHORT = 40  # tokens, a third of the examples have no more: these have room for many heads
LOW = 2000  # exp(-LOW) is 0 in float64
NON_FINITE = ("nan", "inf", "-inf")


# Sizes


@explains_keywords
def lengths(tile: int = 64, longest: int = 260) -> st.SearchStrategy[int]:
    """Sequence lengths: 0 and 1, whole tiles and one token more, one or two off, half a tile over, primes; as often
    more than four tiles, where these are not too long."""
    extra = st.sampled_from((0, 1, -1, 2, tile // 2))
    numbers = [st.integers(0, 4)] + [st.integers(5, longest // tile)] * (longest >= 5 * tile)
    around = [st.builds(lambda tiles, extra: tiles * tile + extra, number, extra) for number in numbers]
    primes = st.sampled_from([prime for prime in PRIMES if prime <= longest])
    return st.one_of(primes, *(each.map(lambda length: min(max(length, 0), longest)) for each in around))


@explains_keywords
def heads(most: int = 24, groups: Sequence[int] = GROUPS) -> st.SearchStrategy[tuple[int, int]]:
    """(num_heads, num_kv_heads): key/value heads times a group of 1, 2, 3, 7 or 8; most often several of both."""
    pairs = [(kv * group, kv) for group in groups for kv in (1, 2, 3) if kv * group <= max(most, 1)]
    several = [pair for pair in pairs if pair[0] > pair[1] > 1]
    return st.sampled_from(pairs + several)


@explains_keywords
def head_dims(widest: int = 256) -> st.SearchStrategy[int]:
    """Head and value dims: powers of two, their neighbours, and those that models have."""
    return st.sampled_from([dim for dim in HEAD_DIMS if dim <= widest])


@explains_keywords
def scales() -> st.SearchStrategy[float | None]:
    """None (1 / sqrt(head_dim)) as often as all else, then 1e-3 to 1e4, and a negative one."""
    return st.none() | st.sampled_from(SCALES)


# Views


@explains_keywords
def layouts() -> st.SearchStrategy[str]:
    """Names of memory layouts for `laid_out`."""
    return st.sampled_from(LAYOUTS)


# Examples

Masks = st.SearchStrategy[Mask | None] | Callable[[MaskShape], st.SearchStrategy[Mask | None]]


@explains_keywords
@dataclass(frozen=True, kw_only=True, repr=False)
class Structure:
    """The parameters that determine an example; `Structure(...).example()` makes it.

    Parameters
    ----------
    q_batch, k_batch, v_batch : tuple of int
        Leading axes; they broadcast.
    num_heads, num_kv_heads : int
        Numbers of query heads and of key/value heads; both are 1 where `has_heads` is False.
    has_heads : bool
        Whether operands have an axis of heads; without it they are 2-D.
    seqlen_q, seqlen_kv : int
        Lengths in tokens.
    head_dim, value_dim : int
        Last axes of q and k, and of v.
    dtype : str
        Name of the operands' dtype.
    mask : Mask or None
        As in `cuflash.attention`.
    scale : float or None
        As in `cuflash.attention`.
    layouts : tuple of str
        Memory layouts of q, k, v, do and dlse; see `laid_out`.
    values : str
        Distribution of the values: "normal", "lattice" (integers -2..2), "constant" (each operand one number),
        "outliers" (one element in 50 is 10 times as large), "small" (1e-3 times normal), "large" (v and do 100 times
        normal), "rising" (k grows from key to key, and with it the scores).
    has_dlse : bool
        Whether there is a dlse; otherwise it is None.
    seed : int
        Seed of the values.
    sink : tuple of int, or None
        The shape of a sink, which broadcasts to (*batch, num_heads).
    sink_dtype : str
        Name of the sink's dtype.
    non_finite : tuple of (operand, place, value)
        Elements that are not finite: "nan", "inf" or "-inf" at that place, in C order and modulo their number, of the
        elements of q, k, v, do or dlse.
    score : Formula, optional
        A score function, whose real arrays all have gradients.
    dropout : Dropout, optional
        Which weights are dropped.
    has_low_rows : bool
        Whether the scores of every other query, from the first, lie 2000 or more below the others, where exp gives 0:
        a softmax must subtract the maximum of the row. The first columns of q and k make it so.

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
        """The shape that `mask` is resolved for.

        Examples
        --------
        >>> Structure(q_batch=(2, 1), k_batch=(3,), seqlen_q=4, seqlen_kv=5).mask_shape
        MaskShape(batch=(2, 3), num_heads=1, seqlen_q=4, seqlen_kv=5)
        """
        batch = np.broadcast_shapes(self.q_batch, self.k_batch, self.v_batch)
        return MaskShape(batch, self.num_heads, self.seqlen_q, self.seqlen_kv)

    def __repr__(self) -> str:
        """Write the fields that differ from the defaults, in the names `np`, `cuflash`, `masks` and `testing`."""
        changed = [
            f"{each.name}={source_text(getattr(self, each.name))}"
            for each in fields(self)
            if not _same_value(getattr(self, each.name), each.default)
        ]
        return f"Structure({', '.join(changed)})"

    def example(self) -> Example:
        """Make the operands, filled by a generator of `seed`.

        Returns
        -------
        Example
            The operands, and their exact results and bounds when they are asked for.

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
        operands = {}
        for (name, shape), layout in zip(shapes.items(), self.layouts):
            kind = accumulator_dtype(dtype) if name == "dlse" else dtype
            filled = _filled(rng, name, shape, self.values)
            if self.has_low_rows and name in "qk":
                filled[..., 0] = self._lowering(name)
            filled = filled.astype(kind)
            for operand, place, value in self.non_finite:
                if operand == name and filled.size:
                    filled.flat[place % filled.size] = float(value)
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
        """First columns of q and k, integers, whose products times the scale are -LOW or less in every other row."""
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


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """The choices that `structures` draws from."""

    tile: int
    dtypes: Sequence[str]
    most_scores: int
    most_rows: int
    max_leaves: int
    widest: int
    longest: int
    has_non_finite: bool
    has_sink: bool
    has_score: bool
    has_dropout: bool
    batch: Sequence[tuple[int, ...]] | None
    grouped_heads: bool
    layouts: Sequence[str]
    empty_rows: bool
    masks: Masks | None
    sink_dtypes: Sequence[str] | None
    broadcast_sinks: bool

    def reasons(self) -> list[str]:
        """Why an argument of `structures` is refused."""
        reasons: list[str] = []
        for name in ("tile", "most_scores", "most_rows", "max_leaves", "widest", "longest"):
            with collecting(reasons):
                whole_number(name, getattr(self, name), 1)
        reasons += _dtype_reasons("dtypes", self.dtypes)
        reasons += [] if self.sink_dtypes is None else _dtype_reasons("sink_dtypes", self.sink_dtypes)
        for name in (
            "has_non_finite", "has_sink", "has_score", "has_dropout", "broadcast_sinks", "grouped_heads", "empty_rows",
        ):  # fmt: skip
            reasons += flag_reasons(name, getattr(self, name))
        reasons += _batch_reasons(self.batch) + _layout_reasons(self.layouts)
        is_strategy = self.masks is None or isinstance(self.masks, st.SearchStrategy) or callable(self.masks)
        if not is_strategy or isinstance(self.masks, Mask):
            reasons.append(
                f"masks must be a strategy of masks, or a function of a MaskShape that returns one; got "
                f"{describe(self.masks)}: write hypothesis.strategies.just(mask), or none() to draw no mask"
            )
        return reasons


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
    """Strategy for `Structure` objects: all of an example but its numbers, which are drawn from a seed.

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
        Draws a `Structure`, whose `example()` makes the arrays.

    Raises
    ------
    UnsupportedProblem
        An argument is none of what `examples` takes; all reasons at once.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(structures(most_scores=1000, longest=30))
    ... def test(structure):
    ...     assert structure.num_heads * structure.seqlen_q * structure.seqlen_kv <= 1000
    >>> test()
    """
    limits = _Limits(
        tile=tile, dtypes=dtypes, most_scores=most_scores, most_rows=most_rows, max_leaves=max_leaves, widest=widest,
        longest=longest, has_non_finite=has_non_finite, has_sink=has_sink, has_score=has_score,
        has_dropout=has_dropout, batch=batch, grouped_heads=grouped_heads, layouts=layouts, empty_rows=empty_rows,
        masks=masks, sink_dtypes=sink_dtypes, broadcast_sinks=broadcast_sinks,
    )  # fmt: skip
    refuse(limits.reasons())
    return _structures(limits)


def _dtype_reasons(argument: str, dtypes: Any) -> list[str]:
    names = dtypes if isinstance(dtypes, (tuple, list)) else ()
    if names and all(isinstance(name, str) and name in DTYPE_NAMES for name in names):
        return []
    came = [_dtype_name(each) for each in (dtypes if isinstance(dtypes, (tuple, list)) else [dtypes])]
    meant = [name for name in came if name in DTYPE_NAMES]
    fix = [name for name in meant if name not in names] or ["float32"]
    shown = f"[{', '.join(map(repr, dtypes))}]" if isinstance(dtypes, list) and len(dtypes) <= 4 else describe(dtypes)
    return [
        f"{argument} must be a sequence of some of the names {', '.join(DTYPE_NAMES)}; got {shown}: "
        f"write {', '.join(map(repr, fix))}, as in {argument}={meant or fix}"
    ]


def _dtype_name(value: Any) -> str:
    """Return the name of a dtype, or of what NumPy takes for one; nothing for what it does not take."""
    try:
        return "" if value is None else np.dtype(value).name
    except Exception:  # dtypes are made by whatever the argument holds
        return ""


def _batch_reasons(batch: Any) -> list[str]:
    axes = batch if isinstance(batch, (tuple, list)) else (None,)
    known = all(isinstance(each, tuple) and all(is_int(extent) and extent >= 0 for extent in each) for each in axes)
    if batch is None or (axes and known):
        return []
    return [f"batch must be a sequence of tuples of ints, the axes to draw from; got {describe(batch)}: [(2,)] is one"]


def _layout_reasons(layouts: Any) -> list[str]:
    if isinstance(layouts, (tuple, list)) and layouts and set(layouts) <= set(LAYOUTS):
        return []
    return [f"layouts must be a sequence of some of {', '.join(LAYOUTS)}; got {describe(layouts)}"]


@st.composite
def _structures(draw: st.DrawFn, limits: _Limits) -> Structure:
    longest = min(limits.longest, draw(st.sampled_from((limits.longest, limits.longest, SHORT))))
    seqlen_q, seqlen_kv = draw(st.tuples(*[lengths(limits.tile, longest)] * 2))
    seqlen_kv = seqlen_q if draw(st.booleans()) else seqlen_kv
    seqlen_kv = seqlen_kv if limits.empty_rows else max(1, seqlen_kv)
    room = min(limits.most_scores // max(1, seqlen_q * seqlen_kv), limits.most_rows // max(1, seqlen_q))
    has_heads, num_heads, num_kv_heads, batches = draw(_axes(limits, room))
    shape = MaskShape(np.broadcast_shapes(*batches), num_heads, seqlen_q, seqlen_kv)
    widest = min(limits.widest, 256 if seqlen_q * num_heads <= 512 else 64)
    dtype = draw(st.sampled_from(tuple(limits.dtypes)))
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
        head_dim=draw(head_dims(widest)),
        value_dim=draw(head_dims(widest)),
        dtype=dtype,
        mask=draw(_masks(limits, shape)),
        scale=draw(scales()),
        layouts=draw(_layouts(limits.layouts)),
        values=draw(st.sampled_from(VALUES)),
        has_dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        sink=sink,
        sink_dtype=sink_dtype,
        non_finite=draw(_non_finite()) if limits.has_non_finite else (),
        score=draw(formulas()) if limits.has_score else None,
        dropout=draw(dropouts()) if limits.has_dropout else None,
        has_low_rows=draw(st.sampled_from((False, False, True))),
    )


@st.composite
def _axes(draw: st.DrawFn, limits: _Limits, room: int) -> tuple[bool, int, int, tuple[tuple[int, ...], ...]]:
    """Draw an axis of heads or none, their numbers, and leading axes of q, k and v, of at most `room` entries."""
    groups = GROUPS if limits.grouped_heads else (1,)
    if limits.batch is not None:
        fitting = [axes for axes in limits.batch if math.prod(axes) <= room] or [min(limits.batch, key=math.prod)]
        axes = draw(st.sampled_from(fitting))
        return True, *draw(heads(room // max(1, math.prod(axes)), groups)), (axes,) * 3
    if not draw(st.sampled_from((True, True, True, False))):
        return False, 1, 1, ((), (), ())
    num_heads, num_kv_heads = draw(heads(room, groups))
    return True, num_heads, num_kv_heads, draw(_leading_axes(room // num_heads))


@st.composite
def _masks(draw: st.DrawFn, limits: _Limits, shape: MaskShape) -> Mask | None:
    """Draw a mask of the given kinds; if no row may be empty, empty rows attend all keys instead."""
    if limits.masks is None:
        is_masked = draw(st.sampled_from((False, True, True, True)))
        mask = draw(mask_strategies.masks(shape, limits.max_leaves)) if is_masked else None
    else:
        mask = draw(limits.masks if isinstance(limits.masks, st.SearchStrategy) else limits.masks(shape))
    if mask is None or limits.empty_rows:
        return mask
    is_empty = ~mask.toarray(shape.seqlen_q, shape.seqlen_kv, batch=shape.batch, num_heads=shape.num_heads).any(axis=-1)
    return mask | Dense(is_empty[..., None]) if is_empty.any() else mask


def _layouts(names: Sequence[str]) -> st.SearchStrategy[tuple[str, ...]]:
    """Layouts of five operands; all contiguous as often as any, where that is allowed."""
    contiguous = [st.just(("contiguous",) * 5)] if "contiguous" in names else []
    return st.one_of(*contiguous, st.tuples(*[st.sampled_from(tuple(names))] * 5))


@explains_keywords
def dropouts() -> st.SearchStrategy[Dropout]:
    """Probabilities, seeds and offsets, and the ends of their ranges."""
    probabilities = st.sampled_from((0, 2.0**-8, 0.1, 0.5, 1 - 2.0**-8)) | st.floats(2.0**-8, 0.9)
    seeds = st.sampled_from((0, 2**64 - 1)) | st.integers(0, 2**64 - 1)
    offsets = st.sampled_from((0, 2**32 - 1)) | st.integers(0, 2**32 - 1)
    return st.builds(Dropout, probabilities, seeds, offsets)


@explains_keywords
@st.composite
def sinks(
    draw: st.DrawFn, shape: MaskShape, dtype: str, dtypes: Sequence[str] | None = None, broadcasts: bool = True
) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a sink for q of a dtype: one for each head, or for each head of a batch entry, or shared."""
    full = (*shape.batch, shape.num_heads)
    kept = draw(st.integers(0, len(full)))
    stretched = draw(st.tuples(*[st.booleans()] * kept))
    sink = tuple(1 if is_one else extent for extent, is_one in zip(full[len(full) - kept :], stretched))
    names = (DTYPE_NAMES if dtype == "float64" else DTYPE_NAMES[:-1]) if dtypes is None else tuple(dtypes)
    of_heads = st.just(full[-1:])
    return draw(of_heads | st.just(sink) if broadcasts else of_heads), draw(st.sampled_from(names))


def _non_finite() -> st.SearchStrategy[tuple[tuple[str, int, str], ...]]:
    """Draw one to three operands, places in them, and the values that are put there."""
    one = st.tuples(
        st.sampled_from(("q", "k", "v", "do", "dlse")), st.integers(0, 2**16), st.sampled_from(NON_FINITE)
    )
    return st.lists(one, min_size=1, max_size=3).map(tuple)


def _leading_axes(room: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Leading axes of q, k and v that broadcast, at most `room` in all; also none and empty ones."""
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
    """Strategy for `Example` objects of every structure; see `structures`.

    Parameters
    ----------
    tile : int
        Tokens of the implementation's tile: lengths gather around its multiples.
    dtypes : sequence of str
        Names of the dtypes to draw from.
    most_scores, most_rows : int
        Caps on batch x heads x seqlen_q x seqlen_kv, and without seqlen_kv.
    max_leaves : int
        Masks that may be composed into one.
    widest : int
        The most that head and value dims may be.
    longest : int
        The most tokens that a sequence may have.
    has_non_finite : bool
        Put NaN or infinities into one to three places of the operands.
    has_sink : bool
        Draw a sink; `sink_dtypes` and `broadcast_sinks` say which.
    has_score : bool
        Give each a random score function with arrays.
    has_dropout : bool
        Draw which weights are dropped.
    batch : sequence of tuple of int, optional
        Leading axes that q, k and v share, of which one tuple is drawn, the smallest where no other fits the caps:
        [(1,), (3,)] makes all operands four-dimensional. None draws any, also axes that broadcast and operands of two
        dimensions.
    grouped_heads : bool
        Whether key/value heads may be fewer than query heads.
    layouts : sequence of str
        Memory layouts to draw from; ["contiguous"] draws no views.
    empty_rows : bool
        Whether queries may attend no key. Otherwise there is at least one key, and a query to which the drawn mask
        gives no key attends all.
    masks : strategy of masks, or function of a MaskShape that returns one, optional
        Masks to draw from: ``hypothesis.strategies.none()`` draws none. None draws every kind, and no mask.
    sink_dtypes : sequence of str, optional
        Names of the dtypes of sinks. None draws every dtype that a call takes beside q.
    broadcast_sinks : bool
        Whether the shape of a sink may be any that broadcasts to (*batch, num_heads); otherwise it is (num_heads,).

    Returns
    -------
    hypothesis.strategies.SearchStrategy
        Draws an `Example`. Its repr is Python source that makes it again, in the names `np`, `cuflash`, `masks`,
        `testing` and `Structure`.

    Raises
    ------
    UnsupportedProblem
        An argument is none of these; all reasons at once.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> @settings(deadline=None, max_examples=5, database=None)
    ... @given(examples(dtypes=["float32"], longest=20))
    ... def test(example):
    ...     assert example.q.dtype == "float32" and example.q.shape[-2] <= 20
    >>> test()
    """
    drawn = structures(
        tile=tile, dtypes=dtypes, most_scores=most_scores, most_rows=most_rows, max_leaves=max_leaves, widest=widest,
        longest=longest, has_non_finite=has_non_finite, has_sink=has_sink, has_score=has_score,
        has_dropout=has_dropout, batch=batch, grouped_heads=grouped_heads, layouts=layouts, empty_rows=empty_rows,
        masks=masks, sink_dtypes=sink_dtypes, broadcast_sinks=broadcast_sinks,
    )  # fmt: skip
    return drawn.map(Structure.example)
