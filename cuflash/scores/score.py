"""A score function with its captured arrays: what `score=` takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
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
from .program import COORDINATES, ArrayType, Curvature, BlockKind, Program, curvature, derived
from .ranges import integer_range
from .trace import trace

MAX_ARRAYS = 8
_COMPOSED = "compose them with @, where (a @ b)(s) is a(b(s)), or write one function, Score(f)"
RESERVED = (
    "q", "k", "v", "o", "lse", "do", "dlse", "dq", "dk", "dv", "out", "bias", "sink", "dropout_seed",
    "s", "b", "h", "i", "j", "self",
)  # fmt: skip
RESTARTED = "restarted"  # a fact of functions that `within` makes: q_starts and kv_starts have an element for each row
UNALIGNED = "unaligned"  # a fact of functions of j - i that were made without `align`
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


class Printing:
    """Holds the function that prints a program as CUDA; `compiler.score_text`, which imports this module, sets it."""

    text: ClassVar[Callable[[Program], str]]


@explains_keywords
class Score:
    """A function of each score and its place, traced when this is made.

    Parameters
    ----------
    function : callable (s, b, h, i, j, **arrays)
        The function. s is the score, scale q . k; b the batch entry, where the axes before the heads count as one in C
        order; h the query head; i and j the positions of query and key. Of Python's operators and NumPy's functions
        those work that have a counterpart in a kernel; another one is refused with the function's line. Plain numbers
        that the function reads, also from outside of it, are arguments of a kernel: another value compiles nothing.
    **arrays : array, or ShapeDtype
        Captured arrays, which the function takes by name: float16, bfloat16, float32, float64, bool or integers of any
        width, with any strides, where q is. ``a[x, y]`` takes as many integer expressions as there are axes;
        ``a[..., h, i, j]`` leaves the axes in front to the batch, against which they broadcast. An array without axes
        is a number that may have a gradient. Integers beyond int32 count as the nearest of int32.

    Attributes
    ----------
    program : Program
        What was traced.
    numbers : tuple of float
        What the program reads beside the arrays.
    arrays : mapping of str to array
        What the function captures.

    Raises
    ------
    TypeError
        A captured array is no array.
    UnsupportedProblem
        The function cannot be traced, or an array cannot be captured; all reasons at once.

    Notes
    -----
    ``(a @ b)(s)`` is ``a(b(s))``. A value of -inf hides a key, as a mask does, but skips no work. At ties of np.minimum
    and np.maximum the first argument has the derivative; abs and sign have 0 at 0, and so have a power of 0 by its
    exponent and a power by 0 by its base; of np.where only the branch that is chosen has one.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.scores import Score
    >>> def capped(s, b, h, i, j, slope):
    ...     return 30 * np.tanh(s / 30) - slope[h] * np.abs(i - j)
    >>> score = Score(capped, slope=np.array([0.5, 0.25], np.float32))
    >>> score.name
    'capped'
    >>> float(score(0.0, 0, 1, 8, 4))                       # the function itself, on numbers or arrays
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
        """Make a Score of the library's own, whose arrays may have names that users' may not have.

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
        made = cls.__new__(cls)
        made._make(function, arrays, [])
        return made

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
        """Return what calls check of the library's own functions; a composed score has the facts of all its parts.

        Examples
        --------
        >>> Score(lambda s, b, h, i, j: s).facts
        frozenset()
        """
        return getattr(self.function, "facts", frozenset())

    @cached_property
    def _curvature(self) -> Curvature:
        """Whether the derivative with respect to s is 1, does not depend on s, or does."""
        return curvature(self.program)

    def __call__(self, s: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        """The function itself on numbers, or on arrays that broadcast: for plots and tests.

        Integers are wide and reals are float32 at least, as in a call: nothing wraps around that a call would not let.
        Lengths are taken for equal where the function counts from the last query and key.

        Raises
        ------
        UnsupportedProblem
            Only shapes of the captured arrays are known.
        """
        shapes = [name for name, array in self.arrays.items() if isinstance(array, ShapeDtype)]
        if shapes:
            raise UnsupportedProblem([f"{name} must be an array here; got its shape alone" for name in shapes])
        given = {name: _widened(_readable(name, array)) for name, array in self.arrays.items()}
        return self.function(*map(_widened, (s, b, h, i, j)), **given)

    def cuda(self, *, backward: bool = False) -> str:
        """The function as CUDA C++: what kernels are compiled with, for those who want to see it.

        `value` is run for each score. What depends on batch entry and head alone is computed in `of_tile`, and what
        depends on the query or the key too in `of_query` and `of_key`. Numbers are arguments.

        Parameters
        ----------
        backward : bool
            The text for backward kernels of a call without ``wrt=``: `value` gives the slope df/ds too.

        Returns
        -------
        str
            The text. Hopper's kernels are given the products q . k and elements of large arrays, and so have another.

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

    __array_ufunc__ = None  # NumPy's arrays leave operators to scores, which refuse them

    def __bool__(self) -> bool:
        raise TypeError(f"scores have no truth value: {_COMPOSED}")

    def __matmul__(self, other: Any) -> Score:
        """The score ``s -> self(other(s))``."""
        if not isinstance(other, Score):
            raise TypeError(f"@ composes two scores; got {describe(other)}: Score(f) makes one of a function")
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
        """Give captured arrays other names, so that a score can be composed with one of its kind.

        Gradients come under the new names.

        Parameters
        ----------
        names : mapping of str to str
            The new name of each array that gets one, by its old name.

        Returns
        -------
        Score
            The same function of arrays of these names.

        Raises
        ------
        TypeError
            `names` is no mapping.
        UnsupportedProblem
            There is no array of an old name, or a new name is no Python name, is reserved, or is another array's; all
            reasons at once.

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
        made = Score._of_reserved(renamed, **{new: self.arrays[old] for old, new in new_names.items()})
        return made._remade_by(Score.renamed, self, dict(names))

    def _with_arrays(self, arrays: Mapping[str, Array]) -> Score:
        """Put other arrays of the same dtypes and numbers of axes in place of the captured ones, without tracing again.

        Parameters
        ----------
        arrays : mapping of str to array, or ShapeDtype
            An array in place of each captured one, with axes of length 1 where it has them.

        Returns
        -------
        Score
            The score over these arrays.

        Raises
        ------
        TypeError
            `arrays` is no mapping.
        UnsupportedProblem
            An array is missing, or is not of the traced kind; all reasons at once.

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
                    f"{kind.name} must be a {kind.dtype} array of shape ({shape}), as when the Score was made; got "
                    f"{describe(array)}: make the Score again after a cast; a module does so in its forward"
                )
        refuse(reasons)
        return self._over({name: held[name] for name in self.arrays})

    def _over(self, arrays: dict[str, Array]) -> Score:
        """Return the score over arrays that are known to be of the traced kinds."""
        made = Score.__new__(Score)
        vars(made).update(vars(self))
        made._remake, made.arrays = None, MappingProxyType(arrays)
        return made

    def _remade_by(self, make: Callable[..., Score], /, *arguments: Any, **options: Any) -> Score:
        """Return a copy whose pickle calls `make` again, for functions that are made inside of another.

        Parameters
        ----------
        make : callable
            Returns an equal score.
        *arguments, **options : object
            What `make` is called with.

        Returns
        -------
        Score
            This score.

        Examples
        --------
        >>> from cuflash.scores import softcap
        >>> Score(softcap(5.0).function)._remade_by(softcap, 5.0)._curvature
        'curved'
        """
        self._remake = make, arguments, options
        return self

    def __reduce__(self) -> tuple[Callable[..., Score], tuple[Any, ...]]:
        """Return a call that makes an equal score, for pickles and copies.

        A pickle needs a function that a module holds. Arrays are arguments of the call, never part of the callable:
        `copy.deepcopy` copies the arguments, with its memo, and takes the callable as it is.
        """
        return _made_again, self._remake or (Score._of_reserved, (self.function,), dict(self.arrays))

    def __str__(self) -> str:
        """The program, an instruction a line, and its numbers."""
        numbers = [f"number {slot} = {value!r}" for slot, value in enumerate(self.numbers)]
        head = f"{self.name}({', '.join(['s', *COORDINATES, *self.arrays])}):"
        return "\n".join([head, *numbers, str(self.program)])

    def __repr__(self) -> str:
        arrays = "".join(f", {name}={describe(array)}" for name, array in self.arrays.items())
        return f"<Score {self.name}{arrays}>"


def _made_again(make: Callable[..., Score], arguments: tuple[Any, ...], options: dict[str, Any]) -> Score:
    return make(*arguments, **options)


def _as_array(name: str, array: Array) -> Array:
    """A captured array of NumPy's, CuPy's, PyTorch's or JAX's; another library's on the host without a copy.

    A list becomes NumPy's array, as `of_list` makes it. Tensors of PyTorch and arrays of JAX stay what they are, since
    they may need gradients.
    """
    array = of_list(name, array)
    if isinstance(array, ShapeDtype) or is_differentiated(array):
        return array
    if is_foreign(array):
        if is_on_cuda(name, array):
            came = f"{kind_of(array)} on a CUDA device"
            raise UnsupportedProblem([f"{name} must be a NumPy or CuPy array; got {came}: cupy.from_dlpack makes one"])
        return taken(name, array, np)
    require_arrays({name: array})
    return array


def _readable(name: str, array: Array) -> Array:
    """A captured array as NumPy's or CuPy's, without a copy and without gradients."""
    if not is_foreign(array):
        return array
    array = array.detach() if is_tensor(array) else array
    return taken_on_cuda(name, array) if is_on_cuda(name, array) else taken(name, array, np)


def _widened(x: Array) -> Array:
    """An array, or a number of NumPy's, in the dtype in which a call computes, which no narrow one overflows.

    Integers beyond int32 count as the nearest of int32, and 16-bit reals are float32.
    """
    dtype = getattr(x, "dtype", None)
    if dtype in HALVES:
        return x.astype(np.float32)
    if dtype is None or dtype.name not in _INTEGERS:
        return x
    return namespace(x).clip(x, *integer_range(dtype)).astype(np.int64)


@lru_cache(maxsize=512)
def _array_type(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> ArrayType | None:
    """Return an array without its data; None for a dtype that cannot be captured."""
    kinds: dict[bool, BlockKind] = {dtype in DTYPES: "real", dtype.name in _INTEGERS: "int", dtype == np.bool: "bool"}
    kind = kinds.get(True) if dtype.isnative else None
    if kind is None:
        return None
    return ArrayType(name, len(shape), dtype.name, kind, tuple(extent == 1 for extent in shape))


def _type_of(name: str, array: Array) -> ArrayType:
    dtype = array.dtype if type(array) is np.ndarray else dtype_of(array)
    found = _array_type(name, dtype, tuple(array.shape))
    if found is None:
        raise UnsupportedProblem(
            [
                f"{name}'s dtype must be {', '.join(known.name for known in DTYPES)}, bool or an integer; got "
                f"{dtype.str if not dtype.isnative else array.dtype}: convert it with {name}.astype"
            ]
        )
    return found


without_other_operators(Score, "scores", _COMPOSED)
