"""The base class of masks, and the algebra of ``& | ^ - ~``.

A mask is evaluated element by element, and, if it has a closed form, for a whole rectangle or a whole row at once.
It is independent of blocks and kernels. Nothing in this module recurses over a tree of masks, because a tree may be
deeper than Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copyreg import __newobj__  # type: ignore[attr-defined]
from dataclasses import dataclass, replace
from operator import and_, or_, xor
from typing import Any, Self, TypeVar

from ..arrays import Array, describe, flag_reasons, is_int, namespace
from ..errors import UnsupportedProblem, collecting, refuse
from ..keywords import explains_keywords
from .content import Described, DeviceForm, mask_namespace
from .coordinates import UNBOUNDED, Intervals, clipped, elements, share_allowed, widened
from .pictures import as_html, as_text, plotted, shown_states
from .shape import MaskShape, block_pair, once_checked, whole_shape
from .written import written

_Value = TypeVar("_Value")
# Methods and properties that describe the elements of a mask; a class must define them together.
_ANSWERS = ("__call__", "intervals", "rectangle", "_has_intervals", "_natural_block", "_device_form")


@dataclass(frozen=True, eq=False, repr=False)
class Mask(Described):
    """The base class of all masks: True if query i of head h in batch entry b attends key j.

    Masks combine by ``&`` (both allow), ``|`` (either allows), ``^`` (exactly one allows), ``-`` (the first allows and
    the second does not) and ``~`` (not allowed). The other operand, on either side, may also be a block index, a
    boolean array, a scipy.sparse array of elements, or a function of (b, h, i, j). ``bool(mask)`` raises, since
    ``and``, ``or`` and ``not`` would call it.

    Masks that hold no arrays compare by value and can be hashed; array contents are never hashed or copied.

    Notes
    -----
    A subclass defines `__call__`, or `intervals`, or both. If it overrides one of them, the closed forms of its parent
    are not used.

    An instance of a plain subclass equals only itself, cannot be hashed, and is planned again at each call. Plans are
    cached for a subclass that is itself decorated with ``@dataclass(frozen=True, eq=False)``, if it has no attributes
    except its fields, and if these are numbers, strings, bytes, dtypes, members of an `Enum`, None, masks, or tuples of
    these. Fields are compared by type and value; an ``__eq__`` or ``__hash__`` of the subclass is not used. A subclass
    that reads anything else, such as a global variable or a captured variable, must not be such a dataclass: the
    library cannot detect changes of these.

    Examples
    --------
    >>> (Band(None, 0) - (lambda b, h, i, j: i == 2)).toarray(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 0, 0]])
    >>> bool(Band(None, 0))
    Traceback (most recent call last):
        ...
    TypeError: a mask has no truth value: combine masks with & | ^ - ~ instead of and, or, not
    """

    __array_priority__ = 1000.0  # higher than NumPy's and CuPy's arrays, so that their operators defer to masks

    def __init_subclass__(cls, **options: Any) -> None:
        """Remove the inherited closed forms from a class that redefines its elements, which they would contradict."""
        super().__init_subclass__(**options)

        def place(name: str) -> int:
            return next(number for number, base in enumerate(cls.__mro__) if name in vars(base))

        newest = min(place("__call__"), place("intervals"))
        for name in _ANSWERS:
            if place(name) > newest and getattr(cls, name) is not getattr(Mask, name):
                setattr(cls, name, vars(Mask)[name])
        if place("resolve") > newest and cls.resolve is not Mask.resolve:
            setattr(cls, "resolve", once_checked(cls.resolve))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        """Return a boolean for each element; the arguments are integer arrays that broadcast against each other.

        ``b`` numbers the entries of all leading axes in C order. The default implementation evaluates `intervals`.
        """
        lo, hi = self._closed_form(b, h, i)
        return (lo <= j) & (j < hi)

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals | None:
        """Return the interval of keys that each row attends, if every row attends one contiguous interval.

        For fixed b and h, lo and hi must not decrease with i. Then rows, columns, rectangles and the transposed mask
        have closed forms, too. A row with lo >= hi is empty.

        Parameters
        ----------
        b, h, i : int arrays
            Batch entry, head and query; they broadcast. b numbers the entries of all leading axes in C order.

        Returns
        -------
        (array, array) or None
            ``lo, hi`` such that row i attends exactly the keys lo <= j < hi; None if the mask has no such closed form.

        Examples
        --------
        >>> import numpy as np
        >>> lo, hi = Band(-1, 0).intervals(0, 0, np.arange(3))
        >>> lo.tolist(), hi.tolist()
        ([-1, 0, 1], [1, 2, 3])
        """
        return None

    @property
    def _has_intervals(self) -> bool:
        """True if `intervals` returns intervals instead of None.

        Examples
        --------
        >>> Band(-1, 0)._has_intervals, (~Band(-1, 0))._has_intervals
        (True, False)
        """
        return self.intervals(0, 0, 0) is not None

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        """Decide nonempty rectangles of rows i0 <= i < i1 and keys j0 <= j < j1 without evaluating their elements.

        Parameters
        ----------
        b, h : int arrays
            Batch entry and head.
        i0, i1, j0, j1 : int arrays
            Bounds of rows and keys; all arguments broadcast.

        Returns
        -------
        may : bool array
            False proves that no element of the rectangle is allowed.
        must : bool array
            True proves that every element of the rectangle is allowed. ``(True, False)`` is always correct.

        Examples
        --------
        >>> may, must = Band(None, 0).rectangle(0, 0, 4, 8, 0, 4)       # queries 4 to 7, keys 0 to 3
        >>> bool(may), bool(must)
        (True, True)
        """
        first, last = self.intervals(b, h, i0), self.intervals(b, h, i1 - 1)
        if first is None or last is None:
            return True, False
        may = (first[0] < j1) & (last[1] > j0)
        must = (last[0] <= j0) & (first[1] >= j1)
        return may, must

    def resolve(self, shape: MaskShape) -> Mask:
        """Convert the mask to absolute coordinates for a shape: alignments become offsets, and arrays are checked.

        Parameters
        ----------
        shape : MaskShape
            The shape that the mask is used for.

        Returns
        -------
        Mask
            A mask with the same elements for that shape.

        Raises
        ------
        UnsupportedProblem
            A required alignment is missing, or an array's shape does not fit.

        Examples
        --------
        >>> from cuflash import masks
        >>> masks.Causal("bottom_right").resolve(MaskShape((), 1, 2, 5))
        Band(upper=3)
        """
        return self

    @property
    def _device_form(self) -> DeviceForm | None:
        """The form in which kernels read the mask's device arrays at each call; None if they do not.

        Examples
        --------
        >>> from cuflash import masks
        >>> masks.Band(-1, 0)._device_form is None
        True
        """
        return None

    @property
    def _natural_block(self) -> tuple[int, int] | None:
        """The block size of the mask, if it consists of whole blocks.

        Examples
        --------
        >>> from cuflash import patterns
        >>> patterns.butterfly(256, block=32)._natural_block
        (32, 32)
        """
        return None

    @explains_keywords
    def on_blocks(self, block: int | tuple[int, int], *, mirrored: bool = False) -> Mask:
        """Return a mask that applies this pattern to whole blocks instead of tokens.

        Query block I attends key block J if, in this mask, token I attends token J of a problem with one token per
        block. This turns patterns such as windows and strides into block-sparse masks without partial blocks.

        Parameters
        ----------
        block : int or (int, int)
            Size of a block in tokens, or block_q and block_kv.
        mirrored : bool
            Also keep block (J, I) for each block (I, J), which adapts causal patterns to bidirectional attention. The
            problem must then have as many query blocks as key blocks.

        Returns
        -------
        Mask
            The pattern of blocks.

        Raises
        ------
        UnsupportedProblem
            `block` is not a block size, or `mirrored` is neither True nor False.

        Examples
        --------
        >>> pattern = Band(-1, 0).on_blocks(2)
        >>> pattern.toarray(6).astype(int)
        array([[1, 1, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0],
               [1, 1, 1, 1, 0, 0],
               [1, 1, 1, 1, 0, 0],
               [0, 0, 1, 1, 1, 1],
               [0, 0, 1, 1, 1, 1]])
        """
        return OnBlocks(self, block, mirrored)

    @explains_keywords
    def toarray(
        self, seqlen_q: int, seqlen_kv: int | None = None, *, batch: tuple[int, ...] = (), num_heads: int | None = None
    ) -> Array:
        """Return the whole mask as a boolean array, True = attend, for small problems and for inspection.

        Parameters
        ----------
        seqlen_q, seqlen_kv : int
            Lengths in tokens; seqlen_kv is seqlen_q by default.
        batch : tuple of int
            Extents of the leading axes.
        num_heads : int, optional
            Number of query heads. By default the result has no axis of heads.

        Returns
        -------
        bool array [*batch, seqlen_q, seqlen_kv] or [*batch, num_heads, seqlen_q, seqlen_kv]
            A NumPy array, or an array on the device of the mask's arrays.

        Raises
        ------
        UnsupportedProblem
            A length is not an int of at least 0, or the mask does not fit the shape.

        Examples
        --------
        >>> Band(0, 1).toarray(2, 3)
        array([[ True,  True, False],
               [False,  True,  True]])
        >>> Band(0, 1).toarray(2, batch=(5,), num_heads=8).shape
        (5, 8, 2, 2)
        """
        shape = whole_shape(seqlen_q, seqlen_kv, batch, 1 if num_heads is None else num_heads)
        resolved = self.resolve(shape)
        xp = mask_namespace(resolved)
        coordinates = (
            xp.arange(extent).reshape([-1 if axis == place else 1 for axis in range(4)])
            for place, extent in enumerate((shape.num_batch, *shape[1:]))
        )
        flat = xp.broadcast_to(elements(resolved, *coordinates), (shape.num_batch, *shape[1:]))
        heads = () if num_heads is None else (shape.num_heads,)
        return flat.reshape(*shape.batch, *heads, *shape[2:]).copy()

    @explains_keywords
    def density(
        self, seqlen_q: int, seqlen_kv: int | None = None, *, batch: tuple[int, ...] = (), num_heads: int = 1
    ) -> float:
        """Compute the exact fraction of (query, key) pairs that the mask allows; waits for the device.

        Parameters
        ----------
        seqlen_q, seqlen_kv : int
            Lengths in tokens; seqlen_kv is seqlen_q by default.
        batch : tuple of int
            Extents of the leading axes; the result is the mean over them.
        num_heads : int
            Number of query heads; the result is the mean over them.

        Returns
        -------
        float
            From 0 to 1; 0 if there are no pairs. `BlockIndex.density` counts whole blocks instead.

        Raises
        ------
        UnsupportedProblem
            A length is not an int of at least 0, or the mask does not fit the shape.

        Examples
        --------
        >>> Band(None, 0).density(4)
        0.625
        """
        shape = whole_shape(seqlen_q, seqlen_kv, batch, num_heads)
        resolved = self.resolve(shape)
        return share_allowed(resolved, shape, mask_namespace(resolved))

    @staticmethod
    def _mask_of(operand: Mask | Array) -> Mask:
        """Convert an operand to a mask; the module `arrays` sets this to its `as_mask`, to avoid a circular import."""
        raise NotImplementedError

    def __and__(self, other: Mask | Array) -> Mask:
        return And((self, self._mask_of(other)))

    def __rand__(self, other: Mask | Array) -> Mask:
        return And((self._mask_of(other), self))

    def __or__(self, other: Mask | Array) -> Mask:
        return Or((self, self._mask_of(other)))

    def __ror__(self, other: Mask | Array) -> Mask:
        return Or((self._mask_of(other), self))

    def __xor__(self, other: Mask | Array) -> Mask:
        return Xor((self, self._mask_of(other)))

    def __rxor__(self, other: Mask | Array) -> Mask:
        return Xor((self._mask_of(other), self))

    def __sub__(self, other: Mask | Array) -> Mask:
        return And((self, Not(self._mask_of(other))))

    def __rsub__(self, other: Mask | Array) -> Mask:
        return And((self._mask_of(other), Not(self)))

    def __invert__(self) -> Mask:
        return Not(self)

    @explains_keywords
    def picture(
        self,
        seqlen_q: int,
        seqlen_kv: int | None = None,
        *,
        batch: tuple[int, ...] = (),
        num_heads: int = 1,
        block: int | tuple[int, int] = 1,
        b: int = 0,
        h: int = 0,
        width: int = 64,
    ) -> str:
        """Return one batch entry and head of the mask as text: █ all allowed, ▒ some, · none.

        Parameters
        ----------
        seqlen_q, seqlen_kv : int
            Lengths in tokens; seqlen_kv is seqlen_q by default.
        batch : tuple of int
            Extents of the leading axes.
        num_heads : int
            Number of query heads.
        block : int or (int, int)
            Tokens per symbol; increased if a line would be longer than `width` symbols.
        b, h : int
            Batch entry, numbered through the leading axes in C order, and head.
        width : int
            Maximum number of symbols per line.

        Returns
        -------
        str
            One line per row of symbols.

        Raises
        ------
        UnsupportedProblem
            The mask does not fit the shape, or an argument breaks its rule.

        Examples
        --------
        >>> print((Band(-2, 0) | (lambda b, h, i, j: j == 0)).picture(6))
        █·····
        ██····
        ███···
        ████··
        █·███·
        █··███
        >>> print(Band(-2, 0).picture(6, block=2))
        ▒··
        ▒▒·
        ·▒▒
        """
        shape = whole_shape(seqlen_q, seqlen_kv, batch, num_heads)
        return as_text(shown_states(self, shape, block, b, h, most_cols=width)[0])

    @explains_keywords
    def plot(
        self,
        seqlen_q: int,
        seqlen_kv: int | None = None,
        *,
        batch: tuple[int, ...] = (),
        num_heads: int = 1,
        block: int | tuple[int, int] = 1,
        b: int = 0,
        h: int = 0,
        ax: Any = None,
    ) -> Any:
        """Plot one batch entry and head of the mask with matplotlib, an optional dependency; queries run downwards.

        Parameters
        ----------
        seqlen_q, seqlen_kv : int
            Lengths in tokens; seqlen_kv is seqlen_q by default.
        batch : tuple of int
            Extents of the leading axes.
        num_heads : int
            Number of query heads.
        block : int or (int, int)
            Tokens per cell; increased if a side would have more than 512 cells.
        b, h : int
            Batch entry, numbered through the leading axes in C order, and head.
        ax : matplotlib.axes.Axes, optional
            Axes to draw on; by default new ones.

        Returns
        -------
        matplotlib.axes.Axes
            The axes with the plot.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        UnsupportedProblem
            As in `picture`.

        Examples
        --------
        >>> from matplotlib.figure import Figure
        >>> Band(-2, 0).plot(6, ax=Figure().add_subplot()).get_xlabel()
        'key'
        """
        shape = whole_shape(seqlen_q, seqlen_kv, batch, num_heads)
        states, shown_block = shown_states(self, shape, block, b, h, most_cols=512, most_rows=512)
        return plotted(states, shape[2:], shown_block, ax)

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        """The lengths of queries and keys that the mask requires; None for a length that it does not restrict.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash import masks
        >>> Band(-2, 0)._own_lengths, masks.Documents(np.array([0, 0, 1]))._own_lengths
        ((None, None), (3, 3))
        """
        return None, None

    def _repr_html_(self) -> str:
        """Return an HTML picture for notebooks, at the mask's own lengths or else at 32 tokens."""
        return as_html(self, self._own_lengths)

    def __repr__(self) -> str:
        return written(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & | ^ - ~ instead of and, or, not")

    def _closed_form(self, b: Array, h: Array, i: Array) -> Intervals:
        bounds = self.intervals(b, h, i)
        if bounds is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither __call__ nor intervals")
        return bounds


@explains_keywords(
    takes=lambda num_positional, keywords: num_positional != 1 or "upper" in keywords,
    advice="Band takes both bounds of j - i: masks.Band(-8, 8) has 8 keys on either side of the query, and "
    "masks.Band(lower=8) has no upper bound",
)
@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """A query i attends the keys j with lower <= j - i <= upper, in absolute coordinates.

    Parameters
    ----------
    lower, upper : int or None
        Bounds of j - i, inclusive; None is unlimited. lower must not exceed upper; ``~Band()`` attends nothing.

    Raises
    ------
    TypeError
        `lower` is a positional argument and `upper` is missing.
    UnsupportedProblem
        A bound is not an int or None, or `lower` is greater than `upper`.

    Examples
    --------
    >>> Band(-1, 0).toarray(3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    lower: int | None = None
    upper: int | None = None

    def __post_init__(self) -> None:
        reasons = []
        for name in ("lower", "upper"):
            bound = getattr(self, name)
            if is_int(bound):
                object.__setattr__(self, name, int(bound))
            elif bound is not None:
                reasons.append(f"{name} must be an int, or None for no bound; got {describe(bound)}")
        if not reasons and self.lower is not None and self.upper is not None and self.lower > self.upper:
            reasons.append(
                f"lower must be at most upper; got {describe(self.lower)} and {describe(self.upper)}, which allow no "
                f"key: exchange them, or write ~masks.Band() to attend nothing"
            )
        refuse(reasons)

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals:
        i, lower, upper = widened(i), clipped(self.lower), clipped(self.upper)
        lo = 0 * i if lower is None else i + lower
        hi = 0 * i + UNBOUNDED if upper is None else i + (upper + 1)
        return lo, hi

    def resolve(self, shape: MaskShape) -> Mask:
        return Band(clipped(self.lower), clipped(self.upper))

    @property
    def transposed(self) -> Band:
        """The band with queries and keys exchanged: lower <= i - j <= upper.

        Returns
        -------
        Band
            The transposed band.

        Examples
        --------
        >>> Band(-1, 3).transposed
        Band(lower=-3, upper=1)
        """
        return Band(*(None if bound is None else -bound for bound in (self.upper, self.lower)))


@dataclass(frozen=True, eq=False, repr=False)
class OnBlocks(Mask):
    """A pattern of tokens applied to whole blocks: the result of `Mask.on_blocks`."""

    mask: Mask
    block: Any  # (block_q, block_kv) after construction
    mirrored: bool = False

    def __post_init__(self) -> None:
        reasons = flag_reasons("mirrored", self.mirrored)
        with collecting(reasons):
            object.__setattr__(self, "block", block_pair(self.block))
        refuse(reasons)

    def __repr__(self) -> str:
        inner, mirrored = _in_brackets(self.mask), ", mirrored=True" if self.mirrored else ""
        return f"{inner}.on_blocks({self.block}{mirrored})"

    @property
    def _natural_block(self) -> tuple[int, int]:
        block_q, block_kv = self.block
        return block_q, block_kv

    def resolve(self, shape: MaskShape) -> Mask:
        grid = -(-shape.seqlen_q // self.block[0]), -(-shape.seqlen_kv // self.block[1])
        if self.mirrored and grid[0] != grid[1]:
            raise UnsupportedProblem(
                f"mirrored=True needs as many query blocks as key blocks; got {grid[0]} and {grid[1]}: change block"
            )
        return replace(self, mask=self.mask.resolve(MaskShape(shape.batch, shape.num_heads, *grid)))

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        row, col = widened(i) // self.block[0], widened(j) // self.block[1]
        allowed = elements(self.mask, b, h, row, col)
        return allowed | elements(self.mask, b, h, col, row) if self.mirrored else allowed

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        rows = i0 // self.block[0], (i1 - 1) // self.block[0] + 1
        cols = j0 // self.block[1], (j1 - 1) // self.block[1] + 1
        may, must = self.mask.rectangle(b, h, *rows, *cols)
        if self.mirrored:
            may_back, must_back = self.mask.rectangle(b, h, *cols, *rows)
            may, must = may | may_back, must | must_back
        return may, must


# The algebra of masks


@dataclass(frozen=True, eq=False, repr=False)
class _Composed(Mask):
    """A combination of masks: evaluates the masks at the leaves of its tree, and combines their results."""

    def __call__(self, b: Array, h: Array, i: Array, j: Array) -> Array:
        def negated(allowed: Array) -> Array:
            return namespace(allowed, b, h, i, j).logical_not(allowed)

        return _folded(self, lambda tip: elements(tip, b, h, i, j), {And: and_, Or: or_, Xor: xor}, negated)

    def rectangle(self, b: Array, h: Array, i0: Array, i1: Array, j0: Array, j1: Array) -> tuple[Array, Array]:
        def negated(answer: tuple[Array, Array]) -> tuple[Array, Array]:
            may, must = answer
            return namespace(must, i0).logical_not(must), namespace(may, i0).logical_not(may)

        def apart(x: tuple[Array, Array], y: tuple[Array, Array]) -> tuple[Array, Array]:
            (x_not, x_none), (y_not, y_none) = negated(x), negated(y)
            return (x[0] | y[0]) & (x_not | y_not), (x[1] & y_none) | (x_none & y[1])

        decided: tuple[Array, Array] = _folded(
            self,
            lambda tip: tip.rectangle(b, h, i0, i1, j0, j1),
            {
                And: lambda x, y: (x[0] & y[0], x[1] & y[1]),
                Or: lambda x, y: (x[0] | y[0], x[1] | y[1]),
                Xor: apart,
            },
            negated,
        )
        return decided

    def resolve(self, shape: MaskShape) -> Mask:
        reasons: list[str] = []

        def resolved(tip: Mask) -> Mask:
            with collecting(reasons):
                return tip.resolve(shape)
            return tip

        mask: Mask = _rebuilt(self, resolved, _simplified)
        refuse(dict.fromkeys(reasons))
        return mask

    def to(self, convert: Callable[[Array], Array]) -> Self:
        if type(self) not in _NODES:
            return super().to(convert)
        converted: Any = _rebuilt(self, lambda tip: tip.to(convert), lambda node, parts: _composed(type(node), parts))
        twin: Self = converted
        return twin

    @property
    def _own_lengths(self) -> tuple[int | None, int | None]:
        known = [node._own_lengths for node, num_parts in _walked(self) if num_parts == 0]
        q, kv = (next((length for length in lengths if length is not None), None) for lengths in zip(*known))
        return q, kv

    @property
    def _natural_block(self) -> tuple[int, int] | None:
        blocks = [node._natural_block for node, num_parts in _walked(self) if num_parts == 0]
        known = [block for block in blocks if block is not None]
        return (min(block[0] for block in known), min(block[1] for block in known)) if known else None

    def __repr__(self) -> str:
        if type(self) not in _NODES:
            return written(self)
        text = _in_brackets(self)
        return text if isinstance(self, Not) else text[1:-1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the tree as a flat list, since `pickle` and `copy` would recurse over the tree."""
        if type(self) not in _NODES:
            return __newobj__, (type(self),), self.__getstate__()
        steps = (
            node if num_parts == 0 else (type(node), num_parts)
            for node, num_parts in _walked(self)
            if num_parts in (0, len(_parts(node)))
        )
        return _from_steps, (tuple(steps),)


@dataclass(frozen=True, eq=False, repr=False)
class _Several(_Composed):
    operands: tuple[Mask, ...]

    def __post_init__(self) -> None:
        """Flatten operands of the same kind: combining many masks makes a wide tree instead of a deep one."""
        flat = _flattened(type(self), self.operands)
        if not flat or not all(isinstance(mask, Mask) for mask in self.operands):
            raise TypeError(f"operands must be masks, at least one; got {self.operands!r}")
        object.__setattr__(self, "operands", flat)


@dataclass(frozen=True, eq=False, repr=False)
class And(_Several):
    """A mask that allows the elements that all operands allow."""

    __call__ = _Several.__call__
    rectangle = _Several.rectangle
    _natural_block = _Several._natural_block
    resolve = _Several.resolve

    def intervals(self, b: Array, h: Array, i: Array) -> Intervals | None:
        common: Intervals | None = None
        for mask in self.operands:
            bounds = mask.intervals(b, h, i)
            if bounds is None:
                return None
            if common is not None:
                xp = namespace(*common, *bounds)
                bounds = xp.maximum(common[0], bounds[0]), xp.minimum(common[1], bounds[1])
            common = bounds
        return common

    @property
    def _has_intervals(self) -> bool:
        return all(mask._has_intervals for mask in self.operands)


@dataclass(frozen=True, eq=False, repr=False)
class Or(_Several):
    """A mask that allows the elements that at least one operand allows."""


@dataclass(frozen=True, eq=False, repr=False)
class Xor(_Several):
    """A mask that allows the elements that an odd number of operands allow: of two operands, exactly one."""


@dataclass(frozen=True, eq=False, repr=False)
class Not(_Composed):
    """A mask that allows the elements that its operand does not allow."""

    operand: Mask


_NODES = (And, Or, Xor, Not)


def _parts(mask: Mask, root: Mask | None = None) -> tuple[Mask, ...]:
    """Return the children of a node; a leaf has none, even if its class derives from that of a node."""
    if mask is not root and type(mask) not in _NODES:
        return ()
    if isinstance(mask, Not):
        return (mask.operand,)
    return mask.operands if isinstance(mask, _Several) else ()


def _kind(node: Mask) -> Any:
    """Return the class among And, Or, Xor and Not of which a node is an instance."""
    return next(kind for kind in _NODES if isinstance(node, kind))


def _walked(mask: Mask) -> Iterator[tuple[Mask, int]]:
    """Walk a tree: yield (leaf, 0) for each leaf, and (node, n) as soon as n parts of the node have been yielded."""
    rest = [(mask, 0)]
    while rest:
        node, num_parts = rest.pop()
        parts = _parts(node, root=mask)
        if num_parts or not parts:
            yield node, num_parts
        if num_parts < len(parts):
            rest += [(node, num_parts + 1), (parts[num_parts], 0)]


def _folded(
    mask: Mask,
    of_tip: Callable[[Mask], _Value],
    of_two: dict[type[Mask], Callable[[_Value, _Value], _Value]],
    negated: Callable[[_Value], _Value],
) -> _Value:
    """Compute the value of a tree from values of its leaves, two at a time; stores at most one value per level."""
    values: list[_Value] = []
    for node, num_parts in _walked(mask):
        if num_parts == 0:
            values.append(of_tip(node))
        elif isinstance(node, Not):
            values.append(negated(values.pop()))
        elif num_parts > 1:
            last = values.pop()
            values.append(of_two[_kind(node)](values.pop(), last))
    return values.pop()


def _rebuilt(
    mask: Mask, of_tip: Callable[[Mask], _Value], of_node: Callable[[Mask, list[_Value]], _Value]
) -> _Value:
    """Compute the value of a tree: that of a leaf with `of_tip`, that of a node with `of_node` from all its parts."""
    values: list[_Value] = []
    for node, num_parts in _walked(mask):
        if num_parts == 0:
            values.append(of_tip(node))
        elif num_parts == len(_parts(node, root=mask)):
            parts = values[-num_parts:]
            values[-num_parts:] = [of_node(node, parts)]
    return values.pop()


def _in_brackets(mask: Mask) -> str:
    """Format a mask as an operand of another mask, in parentheses if it combines several."""
    signs = {And: "&", Or: "|", Xor: "^"}

    def shown(node: Mask, parts: list[str]) -> str:
        return f"~{parts[0]}" if isinstance(node, Not) else f"({f' {signs[_kind(node)]} '.join(parts)})"

    return _rebuilt(mask, repr, shown)


def _composed(kind: Any, parts: list[Mask]) -> Mask:
    mask: Mask = Not(*parts) if kind is Not else kind(tuple(parts))
    return mask


def _simplified(node: Mask, parts: list[Mask]) -> Mask:
    """Build a node from resolved parts: intersect bands, and negate a band with one bound as a band."""
    if isinstance(node, And):
        return intersection(parts)
    inner = parts[0]
    if isinstance(node, Not) and type(inner) is Band:
        if inner.lower is None and inner.upper is not None:
            return Band(inner.upper + 1, None)
        if inner.upper is None and inner.lower is not None:
            return Band(None, inner.lower - 1)
    return _composed(_kind(node), parts)


def _from_steps(steps: tuple[Any, ...]) -> Mask:
    """Build a tree from the list of `_Composed.__reduce__`: leaves, and (class, number of parts) after the parts."""
    masks: list[Mask] = []
    for step in steps:
        if isinstance(step, Mask):
            masks.append(step)
        else:
            kind, num_parts = step
            masks[-num_parts:] = [_composed(kind, masks[-num_parts:])]
    return masks.pop()


def _flattened(kind: type[Mask], masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Replace masks of exactly this class by their operands; a derived class may have another meaning."""
    flat: list[Mask] = []
    for mask in masks:
        if type(mask) is kind and kind in (And, Or, Xor):
            flat.extend(mask.operands)  # type: ignore[attr-defined]
        else:
            flat.append(mask)
    return tuple(flat)


def intersection(masks: Sequence[Mask]) -> Mask:
    """Return the intersection of resolved masks, with all bands merged into one band.

    Without masks, everything is allowed.
    """
    masks = _flattened(And, masks)
    bands = [mask for mask in masks if type(mask) is Band]
    lowers = [band.lower for band in bands if band.lower is not None]
    uppers = [band.upper for band in bands if band.upper is not None]
    lower, upper = max(lowers, default=None), min(uppers, default=None)
    is_empty = lower is not None and upper is not None and lower > upper
    band = Band(UNBOUNDED, None) if is_empty else Band(lower, upper)
    rest = [mask for mask in masks if type(mask) is not Band]
    factors = rest if rest and band == Band() else [band, *rest]
    return factors[0] if len(factors) == 1 else And(tuple(factors))
