"""Tracing: a Python function is called with symbols instead of numbers, and its operations become a `Program`."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..arrays import Array, describe, is_array, is_flag, is_int, is_number
from ..errors import UnsupportedProblem, refuse
from ._primitives import PRIMITIVES
from .program import COORDINATES, ArrayType, Builder, Program, ProgramError

MAX_OPERATIONS = 256
MAX_NUMBERS = 24
_SYMBOL = "a symbol"  # the start of a symbol's repr, which also appears in messages of other libraries
_NO_NUMBER = (
    "the score function is traced with symbols, which are not Python numbers: use NumPy's functions instead of math's, "
    "and pass arrays by name instead of lists and arrays from outside, Score(f, table=table)"
)
_CO_VAR = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS

_OPS: dict[Callable[..., Array], str] = {
    function: primitive.name
    for primitive in PRIMITIVES.values()
    for function in ((primitive.value,) if primitive.traced is None else primitive.traced)
}
_OTHERS = ("square", "reciprocal", "clip")
_SIGNATURES: dict[Callable[..., Array], str] = {
    np.where: "np.where(condition, a, b)",
    np.clip: "np.clip(x, least, most)",
}
_KNOWN = ", ".join(sorted({function.__name__ for function in _OPS} | set(_OTHERS)))


def trace(function: Callable[..., Array], arrays: Mapping[str, ArrayType]) -> tuple[Program, tuple[float, ...]]:
    """Convert a function of (s, b, h, i, j, **arrays) to a program, and return the numbers that it reads.

    Raises
    ------
    UnsupportedProblem
        The function uses an unsupported operation; the reason names the function and the line.
    """
    name = getattr(function, "__name__", type(function).__name__)
    builder = _Tracer(arrays.values())
    symbols = [Symbol(builder, n) for n in builder.put_inputs()]
    captured = {
        array.name: ArraySymbol(builder, number) if array.rank else Symbol(builder, builder.load(number, ()))
        for number, array in enumerate(builder.arrays)
    }
    _require_signature(function, name, symbols, captured)
    try:
        result = function(*symbols, **captured)
        program, numbers = _finished(builder, builder.real(_number_of(builder, result, is_result=True)))
    except ProgramError as error:
        raise UnsupportedProblem(_located(error, name, str(error))) from None
    except Exception as error:
        is_known = isinstance(error, (IndexError, TypeError, ValueError))
        refusal = (builder.refusal or _refusal_of_others(error)) if is_known else None
        if refusal is None:
            error.add_note(f"Raised in the score function {name}, which was called with symbols for s, b, h, i and j.")
            raise
        raise UnsupportedProblem(_located(error, name, refusal)) from error
    reasons = []
    if len(program.instructions) > MAX_OPERATIONS:
        reasons.append(f"{name} must have at most {MAX_OPERATIONS} operations; got {len(program.instructions)}")
    if program.num_numbers > MAX_NUMBERS:
        reasons.append(
            f"{name} must read at most {MAX_NUMBERS} numbers; got {program.num_numbers}: pass them as an array by name"
        )
    refuse(reasons)
    return program, numbers


class _Tracer(Builder):
    """A builder that records why a symbol was refused as a number, since an array that it indexes hides this error."""

    refusal: str | None = None


def _refusal_of_others(error: Exception) -> str | None:
    """Explain the error of a function or an operator that does not accept symbols; return None for any other error."""
    message = str(error).partition("\n")[0].rstrip(":")
    if isinstance(error, ValueError) or not any(name in message for name in (Symbol.__name__, _SYMBOL)):
        return None
    return (
        f"{message}: use NumPy's functions and Python's operators on s, b, h, i and j, and arrays by name, "
        f"Score(f, table=table)"
    )


@dataclass(frozen=True)
class Traced:
    """A score function without Python code: it repeats the instructions of the program of another function.

    Attributes
    ----------
    program : Program
    numbers : tuple of float
        The numbers that the program reads.
    names_of_facts : tuple of str
        The facts of the function, sorted.
    title : str
        The name of the function.
    """

    program: Program
    numbers: tuple[float, ...]
    names_of_facts: tuple[str, ...]
    title: str

    @property
    def facts(self) -> frozenset[str]:
        return frozenset(self.names_of_facts)

    @property
    def __name__(self) -> str:
        return self.title

    def __call__(self, s: Symbol, b: Symbol, h: Symbol, i: Symbol, j: Symbol, **arrays: Array) -> Symbol:
        builder, inputs = s._builder, dict(zip(("s", *COORDINATES), (s, b, h, i, j)))
        values: list[int] = []
        for op, kind, args, value in self.program.instructions:
            operands = [values[n] for n in args]
            if op in inputs:
                values.append(inputs[op]._n)
            elif op == "const":
                values.append(builder.const(value))
            elif op == "number":
                number = key_shift(i) if kind == "int" else self.numbers[value]
                values.append(_number_of(builder, number))
            elif op == "load":
                array = arrays[self.program.arrays[value].name]
                values.append(array._n if isinstance(array, Symbol) else builder.load(array._number, operands))
            else:
                values.append(builder.real(*operands) if op == "real" else builder.apply(op, *operands))
        return Symbol(builder, values[self.program.results[0]])


class _Finished(NamedTuple):
    """A finished program, and the slot of each of its numbers in the list of the builder's numbers and `further`."""

    program: Program
    slots: list[int]
    further: list[float]
    numbers: tuple[float, ...] | None  # the builder's numbers, if the program depends on them


_MAX_FINISHED = 256
_all_finished: dict[Hashable, _Finished] = {}


def _finished(builder: Builder, result: int) -> tuple[Program, tuple[float, ...]]:
    """Finish a builder like `Builder.finish`, with a cache of programs by instructions.

    Instructions contain the slots of numbers instead of the numbers. The program depends on the numbers only if the
    instructions contain a constant integer, because its conversion to a real may equal one of the numbers.
    """
    numbers = builder.numbers
    key = result, tuple(builder.instructions), tuple(builder.arrays)
    cached = _all_finished.get(key)
    if cached is None or cached.numbers not in (None, tuple(numbers)):
        own = tuple(numbers)
        program, slots = builder.program_and_slots([result])
        has_integers = any(each.op == "const" and each.kind == "int" for each in builder.instructions)
        cached = _Finished(program, slots, numbers[len(own) :], own if has_integers else None)
        if len(_all_finished) >= _MAX_FINISHED:
            _all_finished.clear()
        _all_finished[key] = cached
        numbers = list(own)
    values = numbers + cached.further
    return cached.program, tuple([values[slot] for slot in cached.slots])


class Symbol:
    """A symbolic number: an instruction of a builder, with the operators of Python and NumPy."""

    __slots__ = ("_builder", "_n")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, builder: _Tracer, n: int) -> None:
        self._builder, self._n = builder, n

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ProgramError(f"a traced value has no attribute .{name}: use NumPy's functions, as in np.clip(x, 0, 1)")

    def __repr__(self) -> str:
        return f"{_SYMBOL} ({self._builder.kind(self._n)})"

    def apply(self, op: str, *inputs: Array) -> Symbol:
        """Add an operation on symbols and numbers to the program."""
        builder = self._builder
        numbers = [
            each._n if type(each) is Symbol and each._builder is builder else _number_of(builder, each)
            for each in inputs
        ]
        return Symbol(builder, builder.apply(op, *numbers))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Array, **options: Array) -> Symbol:
        if method != "__call__" or options:
            how = f"np.{ufunc.__name__}.{method}" if method != "__call__" else f"{', '.join(options)}= of a ufunc"
            raise ProgramError(f"{how} has no counterpart in a kernel")
        op = _OPS.get(ufunc)
        if op is not None:
            return self.apply(op, *inputs)
        if ufunc is np.square:
            return self.apply("mul", *inputs, *inputs)
        if ufunc is np.reciprocal:
            if self._builder.kind(self._n) == "int":
                raise ProgramError("np.reciprocal of integers is an integer, 0 or 1 at most: write 1 / x")
            return self.apply("div", 1.0, *inputs)
        raise ProgramError(f"np.{ufunc.__name__} has no counterpart in a kernel; use one of: {_KNOWN}")

    def __array_function__(
        self, function: Callable[..., Array], types: Sequence[type], args: Sequence[Array], options: Mapping[str, Array]
    ) -> Symbol:
        if function is np.where and len(args) == 3 and not options:
            return self.apply("where", *args)
        if function is np.clip and len(args) + len(options) == 3:
            x, low, high = args if not options else inspect.signature(_clip).bind(*args, **options).args
            return self._clipped(x, low, high)
        if function in _SIGNATURES:
            raise ProgramError(f"np.{function.__name__} must be called as {_SIGNATURES[function]} in a score function")
        name = getattr(function, "__name__", str(function))
        raise ProgramError(f"np.{name} has no counterpart in a kernel; use one of: {_KNOWN}")

    def _clipped(self, x: Array, low: Array | None, high: Array | None) -> Symbol:
        if low is not None:
            x = self.apply("max", x, low)
        return x if high is None else self.apply("min", x, high)

    def __invert__(self) -> Symbol:
        return self.apply("not", self)

    def __neg__(self) -> Symbol:
        return self.apply("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return self.apply("abs", self)

    def __bool__(self) -> NoReturn:
        raise ProgramError(
            "a score function must not branch on traced values: use np.where, & | ~, np.minimum and np.maximum"
        )

    def _no_number(self, *_: Array) -> NoReturn:
        self._builder.refusal = _NO_NUMBER
        raise ProgramError(_NO_NUMBER)

    __float__ = __int__ = __complex__ = __index__ = __len__ = __iter__ = __getitem__ = __round__ = _no_number
    __trunc__ = __floor__ = __ceil__ = _no_number


def _set_operators(name: str, op: str) -> None:
    """Define a binary Python operator of symbols, and its reflected form for a symbol on the right of a number."""
    setattr(Symbol, f"__{name}__", lambda self, other: self.apply(op, self, other))
    setattr(Symbol, f"__r{name}__", lambda self, other: self.apply(op, other, self))


for _primitive in PRIMITIVES.values():
    if _primitive.is_infix:
        _set_operators("truediv" if _primitive.name == "div" else _primitive.name, _primitive.name)


class ArraySymbol:
    """A symbolic captured array, which can only be indexed."""

    __slots__ = ("_array", "_builder", "_number")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, builder: _Tracer, number: int) -> None:
        self._builder, self._number = builder, number
        self._array = builder.arrays[number]

    @property
    def ndim(self) -> int:
        return self._array.rank

    def __getitem__(self, index: Array) -> Symbol:
        indices = index if isinstance(index, tuple) else (index,)
        name, rank = self._array.name, self._array.rank
        is_batched = bool(indices) and indices[0] is Ellipsis
        indices = indices[is_batched:]
        if any([each is Ellipsis or each is None or isinstance(each, slice) for each in indices]):
            raise ProgramError(f"{name} takes integer expressions as indices, and ... only before them")
        if not is_batched and len(indices) != rank or len(indices) > rank:
            raise ProgramError(f"{name} has {rank} axes and takes {rank} indices; got {len(indices)}")
        return Symbol(self._builder, self._builder.load(self._number, [self._index(each) for each in indices]))

    def _index(self, value: Array) -> int:
        if type(value) is not Symbol and is_int(value) and value < 0:
            raise ProgramError(f"an index of {self._array.name} must count from the start of its axis; got {value}")
        return _number_of(self._builder, value)

    def _refuse(self, *_: Array, **__: Array) -> NoReturn:
        axes = ", ".join(["..."] + ["h", "i", "j"][-self._array.rank :])
        name = self._array.name
        raise ProgramError(f"{name} is an array of {self._array.rank} axes: index it, as in {name}[{axes}]")

    __array_ufunc__ = __array_function__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = _refuse
    __ror__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = _refuse


_SHIFT: ContextVar[Array | None] = ContextVar("shift", default=None)


def key_shift(position: Array) -> Array:
    """Return the position of the last key minus that of the last query; `position` is an argument of the function.

    The result is seqlen_kv - seqlen_q in a call, and 0 for numbers and arrays; `shifted_by` overrides both.
    """
    shift = _SHIFT.get()
    if shift is not None:
        return shift
    return Symbol(position._builder, position._builder.shift()) if isinstance(position, Symbol) else 0


@contextmanager
def shifted_by(shift: Array) -> Iterator[None]:
    """Replace the result of `key_shift` in a `with` block: it is 0 in a cache, and differs between packed sequences."""
    token = _SHIFT.set(shift)
    try:
        yield
    finally:
        _SHIFT.reset(token)


def tanh_fast(x: Array) -> Array:
    """Compute tanh: on a GPU with one instruction, whose error is at most 2^-10.9, and for arrays with NumPy.

    >>> float(tanh_fast(0.0))
    0.0
    """
    return x.apply("tanh_fast", x) if isinstance(x, Symbol) else np.tanh(x)


def _clip(a: Array, a_min: Array | None, a_max: Array | None) -> Any:
    """Define the signature of `numpy.clip`."""


def _number_of(builder: Builder, value: Array, *, is_result: bool = False) -> int:
    """Return the instruction of a symbol, or add that of a Python or NumPy number."""
    if type(value) is Symbol:
        if value._builder is not builder:
            raise ProgramError("the function used a symbol of an earlier call: do not keep symbols after a call")
        return value._n
    if type(value) is float:
        return builder.number(value)
    if type(value) is int and -(2**63) < value < 2**63:
        return builder.const(value)
    if isinstance(value, ArraySymbol):
        value._refuse()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if is_flag(value):
        return builder.const(bool(value))
    if is_int(value):
        if abs(int(value)) >= 2**63:
            raise ProgramError(f"an integer must be below 2**63 in magnitude; got {describe(value)}")
        return builder.const(int(value))
    if is_number(value):
        return builder.number(float(value))
    if is_result:
        raise ProgramError(f"the function must return a number for each s; got {describe(value)}")
    raise ProgramError(
        f"{describe(value)} is neither a number nor traced: pass arrays by name, Score(f, table=table)"
    )


def _takes(function: Callable[..., Array], captured: Mapping[str, Array]) -> bool:
    """True if a plain function has the parameters of a score function; a hundred times as fast as `inspect`."""
    if not isinstance(function, FunctionType):
        return False
    code, num_positional = function.__code__, 1 + len(COORDINATES)
    if code.co_posonlyargcount or code.co_kwonlyargcount or code.co_flags & _CO_VAR:
        return False
    names = code.co_varnames[num_positional : code.co_argcount]
    return code.co_argcount == num_positional + len(captured) and (not names or set(names) == captured.keys())


def _require_signature(
    function: Callable[..., Array], name: str, symbols: list[Symbol], captured: Mapping[str, Array]
) -> None:
    """Refuse a function that does not take the arguments of a score function."""
    if _takes(function, captured):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*symbols, **captured)
    except TypeError as error:
        wanted = ", ".join(["s", *COORDINATES, *captured])
        fix = "arrays follow j and are passed by name, Score(f, table=table)"
        raise UnsupportedProblem(f"{name} must take ({wanted}); got {name}{signature}: {error}; {fix}") from None


_LIBRARIES = ("numpy", "jax", "torch")  # a refusal names the caller's line that calls one of them


def _located(error: Exception, name: str, refusal: str) -> str:
    """Start a refusal with the function and line that caused it, and the text of the line if the source is available.

    If the line reads an array or a list from outside the function, the result names it.
    """
    location: tuple[FrameType, int] | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module not in (__name__, Builder.__module__) and module.partition(".")[0] not in _LIBRARIES:
            location = frame, line
    if location is None:
        return f"{name}: {refusal}"
    frame, line = location
    code = frame.f_code
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip().rstrip(":")
    for table in (*code.co_freevars, *code.co_names):
        value = frame.f_locals.get(table, frame.f_globals.get(table))
        if not is_array(value) and not isinstance(value, (list, tuple)) or text and table not in text:
            continue
        if refusal == _NO_NUMBER and (f"{table}[" in text or not text):
            refusal = (
                f"the score function is traced with symbols, so {table}[...] of an array from outside cannot be read: "
                f"pass the array by name, Score(f, table=table)"
            )
        refusal = refusal.replace("table=table", f"{table}={table}")
    return f"{code.co_name}, line {line}: " + (f"{text}: {refusal}" if text else refusal)
