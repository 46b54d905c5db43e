"""A score function with its captured arrays: the argument `score=`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from keyword import iskeyword
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from ..arrays import (
    DTYPES, HALVES, Array, ShapeDtype, describe, flag_reasons, namespace, of_list, require_arrays,
)  # fmt: skip
from ..errors import UnsupportedProblem, refuse, without_other_operators
from ..keywords import explains_keywords
from ..layouts import (
    dtype_of, is_differentiated, is_foreign, is_on_cuda, is_tensor, kind_of, taken, taken_on_cuda,
)  # fmt: skip
from .program import COORDINATES, ArrayType, BlockKind, Program, derived
from .ranges import integer_range
from .trace import Traced, trace

MAX_ARRAYS = 8
_COMPOSED = "compose them with @, where (a @ b)(s) is a(b(s)), or write one function, Score(f)"
RESERVED = (
    "q", "k", "v", "o", "lse", "do", "dlse", "dq", "dk", "dv", "out", "bias", "sink", "dropout_seed",
    "s", "b", "h", "i", "j", "self",
)  # fmt: skip
RESTARTED = "restarted"  # a fact of functions that `within` returns: q_starts and kv_starts have an element per row
UNALIGNED = "unaligned"  # a fact of functions that depend on j - i and have no alignment
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


class Printing:
    """The function that prints a program as CUDA, which `compiler.score_text` sets to avoid a circular import."""

    text: ClassVar[Callable[[Program], str]]


@explains_keywords
class Score:
    """A function of each score and its position, which is traced at construction.

    Parameters
    ----------
    function : callable (s, b, h, i, j, **arrays)
        The function. s is the score, scale q . k; b the batch entry, numbered through the axes before the heads in C
        order; h the query head; i and j the positions of query and key. The function may use the Python operators and
        NumPy functions that have a counterpart in kernels; others are refused with the line of the function. Plain
        numbers that the function reads, including global and captured variables, are arguments of kernels: different
        values do not recompile.
    **arrays : array, or ShapeDtype
        Captured arrays, which the function receives by name: float16, bfloat16, float32, float64, bool or integers of
        any width, with any strides, on the device of q. ``a[x, y]`` takes one integer expression per axis. With
        ``a[..., h, i, j]``, the leading axes broadcast against the batch and are indexed by it. A 0-d array is a number
        that may have a gradient. Integers outside int32 are clipped to int32.

    Attributes
    ----------
    program : Program
        The traced program.
    numbers : tuple of float
        The numbers that the program reads.
    arrays : mapping of str to array
        The captured arrays.

    Raises
    ------
    TypeError
        A captured array is not an array.
    UnsupportedProblem
        The function cannot be traced, or an array cannot be captured; the error lists all reasons.

    Notes
    -----
    ``(a @ b)(s)`` is ``a(b(s))``. A value of -inf masks a key, but, unlike a mask, does not skip its work. Derivatives
    at special points: at ties of np.minimum and np.maximum the first argument has the derivative; those of abs and sign
    at 0 are 0, and so are that of ``0 ** x`` with respect to x and of ``x ** 0`` with respect to x; in np.where only
    the chosen branch has a derivative.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.scores import Score
    >>> def capped(s, b, h, i, j, slope):
    ...     return 30 * np.tanh(s / 30) - slope[h] * np.abs(i - j)
    >>> score = Score(capped, slope=np.array([0.5, 0.25], np.float32))
    >>> score.name
    'capped'
    >>> float(score(0.0, 0, 1, 8, 4))                       # calls the function on numbers or arrays
    -1.0
    >>> q = k = v = np.ones((2, 16, 8), np.float32)
    >>> cuflash.attention(q, k, v, score=score).shape
    (2, 16, 8)
    """

    def __init__(self, function: Callable[..., Array], /, **arrays: Array) -> None:
        reserved = [name for name in arrays if name in RESERVED]
        reasons = [f"score arrays may not be called {', '.join(RESERVED)}; got {name}" for name in reserved]
        self._make(function, arrays, reasons)

    @classmethod
    def _of_reserved(cls, function: Callable[..., Array], /, **arrays: Array) -> Score:
        """Create a Score for the library itself; its arrays may have reserved names.

        Parameters
        ----------
        function : callable (s, b, h, i, j, **arrays)
            As in `Score`.
        **arrays : array, or ShapeDtype
            As in `Score`.

        Returns
        -------
        Score
            The traced function.

        Raises
        ------
        TypeError, UnsupportedProblem
            As `Score` raises them.

        Examples
        --------
        >>> import numpy as np
        >>> Score._of_reserved(lambda s, b, h, i, j, bias: s + bias[h], bias=np.ones(2)).name
        '<lambda>'
        """
        score = cls.__new__(cls)
        score._make(function, arrays, [])
        return score

    def _make(
        self, function: Callable[..., Array], arrays: dict[str, Array], reasons: list[str], most: int = MAX_ARRAYS
    ) -> None:
        if not callable(function):
            raise TypeError(f"score must be a Score or a function of (s, b, h, i, j); got {describe(function)}")
        if len(arrays) > most:
            reasons.append(f"a score takes at most {MAX_ARRAYS} arrays; got {len(arrays)}: join some of them")
        held, types = {}, {}
        for name, array in arrays.items():
            try:
                held[name] = array if type(array) is np.ndarray else _as_array(name, array)
                types[name] = _type_of(name, held[name])
            except UnsupportedProblem as error:
                reasons += error.reasons
        refuse(reasons)
        self._remake: tuple[Callable[..., Score], tuple[Any, ...], dict[str, Any]] | None = None
        self.function, self.arrays = function, MappingProxyType(held)
        self.program: Program
        self.numbers: tuple[float, ...]
        self.program, self.numbers = trace(function, types)

    @property
    def name(self) -> str:
        """The function's name.

        Examples
        --------
        >>> Score(lambda s, b, h, i, j: s / 2).name
        '<lambda>'
        """
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def facts(self) -> frozenset[str]:
        """The facts that calls check, such as "unaligned"; a composed score has the facts of all its parts.

        Examples
        --------
        >>> Score(lambda s, b, h, i, j: s).facts
        frozenset()
        """
        return getattr(self.function, "facts", frozenset())

    @property
    def _traced(self) -> Traced:
        """The function as data, without Python code and arrays.

        Examples
        --------
        >>> score = Score(lambda s, b, h, i, j: s / 3)
        >>> Score._of_trace(score._traced).numbers == score.numbers
        True
        """
        return Traced(self.program, self.numbers, tuple(sorted(self.facts)), self.name)

    @classmethod
    def _of_trace(cls, traced: Traced) -> Score:
        """Return the score that was traced, whose arrays are missing: each must be replaced before the score is used.

        Parameters
        ----------
        traced : Traced

        Returns
        -------
        Score

        Examples
        --------
        >>> import numpy as np
        >>> score = Score(lambda s, b, h, i, j, slope: s * slope[h], slope=np.ones(2))
        >>> Score._of_trace(score._traced).program == score.program
        True
        """
        score = cls.__new__(cls)
        arrays = MappingProxyType({each.name: None for each in traced.program.arrays})
        vars(score).update(
            function=traced, program=traced.program, numbers=traced.numbers, arrays=arrays, _remake=None
        )  # fmt: skip
        return score

    def __call__(self, s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        """Evaluate the function on numbers, or on arrays that broadcast, for plots and tests.

        Integers are converted to int64 and reals at least to float32, as in attention calls. A function that counts
        from the last query and key assumes equal lengths.

        Raises
        ------
        UnsupportedProblem
            A captured array is only a shape and dtype.
        """
        shapes = [name for name, array in self.arrays.items() if isinstance(array, ShapeDtype)]
        if shapes:
            raise UnsupportedProblem([f"{name} must be an array to evaluate it; got only its shape" for name in shapes])
        captured = {name: _widened(_readable(name, array)) for name, array in self.arrays.items()}
        return self.function(*map(_widened, (s, b, h, i, j)), **captured)

    def cuda(self, *, backward: bool = False) -> str:
        """Return the CUDA C++ text of the function that is compiled into kernels, for inspection.

        `value` runs for each score. Values that depend only on batch entry and head are computed in `of_tile`, and
        those that also depend on the query or the key in `of_query` and `of_key`. Numbers are arguments.

        Parameters
        ----------
        backward : bool
            Return the text for backward kernels of a call without ``wrt=``, in which `value` also returns df/ds.

        Returns
        -------
        str
            The text. Hopper kernels have a different text, because they pass q . k and elements of large arrays to it.

        Raises
        ------
        UnsupportedProblem
            `backward` is neither True nor False.

        Examples
        --------
        >>> text = Score(lambda s, b, h, i, j: np.where(i < j, s, 30 * np.tanh(s / 30))).cuda()
        >>> [line.strip() for line in text.splitlines() if "tangent" in line]
        ['const T x7 = tangent(x6);']
        """
        refuse(flag_reasons("backward", backward))
        return Printing.text(derived(self.program) if backward else self.program)

    __array_ufunc__ = None  # NumPy arrays defer their operators to scores, which refuse them

    def __bool__(self) -> bool:
        raise TypeError(f"scores have no truth value: {_COMPOSED}")

    def __matmul__(self, other: Any) -> Score:
        """Return the score ``s -> self(other(s))``."""
        if not isinstance(other, Score):
            raise TypeError(f"@ composes two scores; got {describe(other)}: convert a function with Score(f)")
        shared = [name for name in self.arrays if name in other.arrays and self.arrays[name] is not other.arrays[name]]
        if shared:
            raise UnsupportedProblem(
                [
                    f"{name} names an array of {self.name} and another of {other.name}: give one of them another name, "
                    f"by renamed({{{name!r}: {name + '_2'!r}}})"
                    for name in shared
                ]
            )
        outer, inner, outer_names, inner_names = self.function, other.function, [*self.arrays], [*other.arrays]

        def composed(s: Array, b: Array, h: Array, i: Array, j: Array, **arrays: Array) -> Array:
            between = inner(s, b, h, i, j, **{name: arrays[name] for name in inner_names})
            return outer(between, b, h, i, j, **{name: arrays[name] for name in outer_names})

        composed.__name__ = f"{self.name} @ {other.name}"
        setattr(composed, "facts", self.facts | other.facts)
        return Score._of_reserved(composed, **{**other.arrays, **self.arrays})._remade_by(operator.matmul, self, other)

    def renamed(self, names: Mapping[str, str]) -> Score:
        """Return the score with renamed captured arrays, so that a score can be composed with another one of its kind.

        Gradients have the new names.

        Parameters
        ----------
        names : mapping of str to str
            The new names by old names, for the arrays to rename.

        Returns
        -------
        Score
            The same function with renamed arrays.

        Raises
        ------
        TypeError
            `names` is not a mapping.
        UnsupportedProblem
            An old name is unknown, or a new name is not a Python identifier, is reserved, or belongs to another array;
            the error lists all reasons.

        Examples
        --------
        >>> import numpy as np
        >>> from cuflash.scores import temperature
        >>> first, second = (temperature(np.full(2, factor, np.float32)) for factor in (2, 3))
        >>> both = second.renamed({"per_head": "again"}) @ first
        >>> float(both(1.0, 0, 0, 0, 0)), [*both.arrays]
        (6.0, ['per_head', 'again'])
        """
        if not isinstance(names, Mapping):
            raise TypeError(f"names must be a mapping of old names to new ones; got {describe(names)}")
        known = ", ".join(self.arrays) or f"of which {self.name} has none"
        old_names = [name for name in names if name not in self.arrays]
        reasons = [f"names must have names of captured arrays, {known}; got {describe(name)}" for name in old_names]
        for new in names.values():
            if not isinstance(new, str) or not new.isidentifier() or iskeyword(new) or new in RESERVED:
                reasons.append(f"names must be Python names other than {', '.join(RESERVED)}; got {describe(new)}")
        new_names = {old: names.get(old, old) for old in self.arrays}
        if not reasons and len(set(new_names.values())) < len(new_names):
            reasons.append(f"names must differ from array to array; got {', '.join(new_names.values())}")
        refuse(reasons)
        function = self.function

        def renamed(s: Array, b: Array, h: Array, i: Array, j: Array, **arrays: Array) -> Array:
            return function(s, b, h, i, j, **{old: arrays[new] for old, new in new_names.items()})

        renamed.__name__ = self.name
        setattr(renamed, "facts", self.facts)
        score = Score._of_reserved(renamed, **{new: self.arrays[old] for old, new in new_names.items()})
        return score._remade_by(Score.renamed, self, dict(names))

    def _with_arrays(self, arrays: Mapping[str, Array]) -> Score:
        """Replace the captured arrays by others of the same dtypes and numbers of axes, without tracing again.

        Parameters
        ----------
        arrays : mapping of str to array, or ShapeDtype
            A replacement for each captured array, with length 1 along the same axes.

        Returns
        -------
        Score
            The score with these arrays.

        Raises
        ------
        TypeError
            `arrays` is not a mapping.
        UnsupportedProblem
            An array is missing, or its type differs from the traced one; the error lists all reasons.

        Examples
        --------
        >>> import numpy as np
        >>> score = Score(lambda s, b, h, i, j, slope: s - slope[h], slope=np.ones(2))
        >>> float(score._with_arrays({"slope": np.full(2, 3.0)})(0.0, 0, 0, 0, 0))
        -3.0
        """
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays must be a mapping of names to arrays; got {describe(arrays)}")
        reasons, held = [], {}
        for kind in self.program.arrays:
            array = arrays.get(kind.name)
            held[kind.name] = of_list(kind.name, array, np.dtype(kind.dtype))
            if array is None or _type_of(kind.name, _as_array(kind.name, held[kind.name])) != kind:
                shape = ", ".join("1" if is_one else "n" for is_one in kind.is_single) + "," * (kind.rank == 1)
                reasons.append(
                    f"{kind.name} must be a {kind.dtype} array of shape ({shape}), as when the Score was created; got "
                    f"{describe(array)}: create the Score again after a cast, for example in a module's forward method"
                )
        refuse(reasons)
        return self._over({name: held[name] for name in self.arrays})

    def _over(self, arrays: dict[str, Array]) -> Score:
        """Return the score with arrays that are known to have the traced types."""
        score = Score.__new__(Score)
        vars(score).update(vars(self))
        score._remake, score.arrays = None, MappingProxyType(arrays)
        return score

    def _remade_by(self, make: Callable[..., Score], /, *arguments: Any, **options: Any) -> Score:
        """Set the call that recreates this score from a pickle, since functions inside functions cannot be pickled.

        Parameters
        ----------
        make : callable
            Returns an equal score.
        *arguments, **options : object
            The arguments of `make`.

        Returns
        -------
        Score
            This score.

        Examples
        --------
        >>> from cuflash.scores import softcap
        >>> Score(softcap(5.0).function)._remade_by(softcap, 5.0)._remake[1]
        (5.0,)
        """
        self._remake = make, arguments, options
        return self

    def __reduce__(self) -> tuple[Callable[..., Score], tuple[Any, ...]]:
        """Return a call that makes an equal score, for pickles and copies.

        Pickling requires a function at module level. Arrays are arguments of the call, never part of the callable:
        `copy.deepcopy` copies the arguments, with its memo, but not the callable.
        """
        return _rebuilt, self._remake or (Score._of_reserved, (self.function,), dict(self.arrays))

    def __str__(self) -> str:
        """Return the program, one instruction per line, and its numbers."""
        numbers = [f"number {slot} = {value!r}" for slot, value in enumerate(self.numbers)]
        head = f"{self.name}({', '.join(['s', *COORDINATES, *self.arrays])}):"
        return "\n".join([head, *numbers, str(self.program)])

    def __repr__(self) -> str:
        arrays = "".join(f", {name}={describe(array)}" for name, array in self.arrays.items())
        return f"<Score {self.name}{arrays}>"


def _rebuilt(make: Callable[..., Score], arguments: tuple[Any, ...], options: dict[str, Any]) -> Score:
    return make(*arguments, **options)


def _as_array(name: str, array: Array) -> Array:
    """Return a captured array as a NumPy, CuPy, PyTorch or JAX array, without a copy.

    Lists, and host arrays of other libraries, become NumPy arrays. PyTorch tensors and JAX arrays are not converted,
    since they may require gradients.
    """
    array = of_list(name, array)
    if isinstance(array, ShapeDtype) or is_differentiated(array):
        return array
    if is_foreign(array):
        if is_on_cuda(name, array):
            kind = f"{kind_of(array)} on a CUDA device"
            raise UnsupportedProblem(
                f"{name} must be a NumPy or CuPy array; got {kind}: convert it with cupy.from_dlpack"
            )
        return taken(name, array, np)
    require_arrays({name: array})
    return array


def _readable(name: str, array: Array) -> Array:
    """Convert a captured array to NumPy or CuPy, without a copy and without gradients."""
    if not is_foreign(array):
        return array
    array = array.detach() if is_tensor(array) else array
    return taken_on_cuda(name, array) if is_on_cuda(name, array) else taken(name, array, np)


def _widened(x: Array) -> Array:
    """Convert an array, or a NumPy number, to the dtype in which a call computes, so that narrow ones do not overflow.

    Integers are clipped to int32 and become int64; 16-bit reals become float32.
    """
    dtype = getattr(x, "dtype", None)
    if dtype in HALVES:
        return x.astype(np.float32)
    if dtype is None or dtype.name not in _INTEGERS:
        return x
    return namespace(x).clip(x, *integer_range(dtype)).astype(np.int64)


@lru_cache(maxsize=512)
def _array_type(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> ArrayType | None:
    """Return the type of a captured array; None for a dtype that cannot be captured."""
    kinds: dict[bool, BlockKind] = {dtype in DTYPES: "real", dtype.name in _INTEGERS: "int", dtype == np.bool: "bool"}
    kind = kinds.get(True) if dtype.isnative else None
    if kind is None:
        return None
    return ArrayType(name, len(shape), dtype.name, kind, tuple(extent == 1 for extent in shape))


def _type_of(name: str, array: Array) -> ArrayType:
    dtype = array.dtype if type(array) is np.ndarray else dtype_of(array)
    array_type = _array_type(name, dtype, tuple(array.shape))
    if array_type is None:
        raise UnsupportedProblem(
            f"{name}'s dtype must be {', '.join(known.name for known in DTYPES)}, bool or an integer; got "
            f"{dtype.str if not dtype.isnative else array.dtype}: cast it to float32"
        )
    return array_type


without_other_operators(Score, "scores", _COMPOSED)
