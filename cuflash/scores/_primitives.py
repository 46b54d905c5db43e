"""The operations of score functions: one record per operation, with its CUDA text, derivative, error and range.

To add an operation, add a record to `PRIMITIVES`, and a device function to kernels_cu/attention/score_math.cuh if CUDA
does not have one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array

Reals = NDArray[np.float64]
Signature = Literal["number", "real", "whole", "comparison", "logical", "test", "choice"]


class Arithmetic(NamedTuple):
    """The unit roundoff, the smallest normal and the largest number of the dtype in which a kernel computes."""

    ua: float
    wa: float
    largest: float


class Approximation(NamedTuple):
    """An exact value, a bound on the error of a kernel's value, and whether the kernel's value cannot be negative.

    The error of a condition is True if the kernel's value may be the opposite of the exact value.
    """

    value: Reals
    error: Reals
    is_nonnegative: bool


class Derivation(Protocol):
    """A builder of the instructions of a derivative, which refers to instructions by their numbers.

    If g is 0 because a branch was not chosen, `times`, `over` and `negative` keep it 0, even if the derivative of that
    branch is infinite or NaN.
    """

    zero: int
    one: int

    def op(self, n: int) -> str: ...
    def const(self, value: float) -> int: ...
    def apply(self, op: str, *args: int) -> int: ...
    def times(self, g: int, factor: int) -> int: ...
    def over(self, g: int, divisor: int) -> int: ...
    def negative(self, g: int) -> int: ...


def error_of_integers(model: Arithmetic, x: Reals, *args: Approximation) -> float:
    """Return the error of an integer: 0, or inf if rounding may change a comparison of reals on which it depends."""
    return math.inf if any(np.any(np.greater(arg.error, 0)) for arg in args) else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Primitive:
    """An operation of score functions.

    Attributes
    ----------
    name : str
        The operation's name in programs.
    signature : str
        Kinds of the arguments and of the result. "number": integers to an integer, or reals to a real. "real": reals to
        a real. "whole": an integer and a positive constant integer to an integer. "comparison": two numbers to a bool.
        "logical": bools to a bool. "test": a real to a bool. "choice": `where`.
    value : callable
        The NumPy function.
    cuda : str
        The C++ expression; ``{}`` stands for each argument.
    traced : tuple of callable, optional
        NumPy functions that are traced as this operation. Default: `value`.
    python : str
        The Python expression, for messages. Default: a call of `value`.
    fold : callable, optional
        The function of Python numbers with which operations on constants are folded into constants.
    derivative : tuple of callable or None
        For each argument, a function of (derivation, g, n, *arguments) that returns g times the derivative of this
        operation, the instruction n, with respect to that argument. If g is the adjoint of n, the result is a term of
        the argument's adjoint; if g is the tangent of the argument, it is a term of the tangent of n. None, or an empty
        tuple: 0 everywhere.
    error : callable, optional
        Returns the error of a real result, or whether a condition may turn out the other way. Takes the `Arithmetic`,
        the exact result and the `Approximation` of each argument. Default: `error_of_integers`.
    is_nonnegative : callable
        Returns True if rounding cannot make a result negative. Takes the same property of each argument.
    range : callable, optional
        Returns the least and the greatest result. Takes the range of each integer argument. Default: the operation is
        monotone in each argument, so that its extremes are at the ends of their ranges.
    trend : callable, optional
        Returns for each argument the sign of the change of an integer result as the argument increases, or an empty
        tuple if the sign is not fixed. Takes the values of constant arguments, and None for others.
    has_steps : bool
        True if an integer result may stay the same while an argument changes.
    is_special : bool
        True if kernels compute the operation on the special function units.
    """

    name: str
    signature: Signature
    value: Callable[..., Array]
    cuda: str
    traced: tuple[Callable[..., Array], ...] | None = None
    python: str = ""
    fold: Callable[..., int] | None = None
    derivative: tuple[Callable[..., int] | None, ...] = ()
    error: Callable[..., Reals | NDArray[np.bool] | float] = error_of_integers
    is_nonnegative: Callable[[Sequence[bool]], bool] = lambda args: False
    range: Callable[..., tuple[int, int]] | None = None
    trend: Callable[..., tuple[int, ...]] | None = None
    has_steps: bool = False
    is_special: bool = False

    @property
    def is_call(self) -> bool:
        return not self.python or self.python.endswith(")")

    @property
    def is_infix(self) -> bool:
        return not self.is_call and self.python.startswith("{}")

    def text(self, args: Sequence[str]) -> str:
        """Return the Python expression."""
        return self.python.format(*args) if self.python else f"np.{self.value.__name__}({', '.join(args)})"


# Derivatives.


def _slope_by_base(d: Derivation, g: int, n: int, a: int, b: int) -> int:
    slope = d.times(g, d.apply("mul", b, d.apply("pow", a, d.apply("sub", b, d.one))))
    if d.op(b) not in ("const", "number"):  # a "number" is not 0, and a "const" of 0 is handled below
        slope = d.apply("where", d.apply("ne", b, d.zero), slope, d.zero)
    return d.zero if b == d.zero else slope


def _slope_by_exponent(d: Derivation, g: int, n: int, a: int, b: int) -> int:
    if d.op(b) in ("const", "number", "real"):
        return d.zero
    slope = d.times(g, d.apply("mul", n, d.apply("log", a)))
    if d.op(a) != "number":  # an instruction "number" is not 0; for 0, the logarithm is infinite and the slope 0
        slope = d.apply("where", d.apply("ne", a, d.zero), slope, d.zero)
    return slope


def _slope_of_tanh(d: Derivation, g: int, n: int, a: int) -> int:
    return d.times(g, d.apply("sub", d.one, d.apply("mul", n, n)))


# Errors. The errors of arguments are propagated by the largest change of the function within them instead of its
# derivative at the value, so that the bounds also hold for large errors. Then each operation adds its own roundoff.


def _error_of_sum(model: Arithmetic, x: Reals, a: Approximation, b: Approximation) -> Reals:
    """Return the propagated error plus 1 ua of the result. If exact terms add up to 0, the sum is exact."""
    passed = a.error + b.error
    error = np.where(np.equal(x, 0) & np.equal(passed, 0), 0, passed + model.ua * (np.abs(x) + passed) + model.wa)
    return np.where(np.isinf(x) & np.isfinite(passed), 0, error)


def _error_of_product(model: Arithmetic, x: Reals, a: Approximation, b: Approximation) -> Reals:
    """Return the propagated error plus 1 ua of the result."""
    error = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
    error = error + model.ua * (np.abs(x) + error) + model.wa
    is_certain = (np.abs(a.value) > a.error) & (np.abs(b.value) > b.error)  # no argument may be 0, or change its sign
    return np.where(np.isinf(x), np.where(is_certain, 0, np.inf), error)


def _error_of_quotient(model: Arithmetic, x: Reals, a: Approximation, b: Approximation) -> Reals:
    """Return the propagated error plus 2 ua of the result."""
    room = np.abs(b.value) - b.error
    error = (a.error + np.abs(x) * b.error) / room
    return np.where(room > 0, error + 2 * model.ua * (np.abs(x) + error) + model.wa, np.inf)


def _error_of_power(model: Arithmetic, x: Reals, a: Approximation, b: Approximation) -> Reals:
    """Return the error of exp(b log(a)) with the errors of its parts, for an a that cannot be 0.

    For b = 1 or 0, the errors of kernels and NumPy are smaller. 0 to a positive power is exactly 0.
    """
    log = np.log(np.abs(a.value))
    e_log = _error_of_log(model, log, a._replace(value=np.abs(a.value)))
    exponent = np.abs(b.value) * e_log + np.abs(log) * b.error + b.error * e_log
    exponent = exponent + 2 * model.ua * (np.abs(b.value * log) + exponent)
    is_integer = np.equal(np.trunc(b.value), b.value) & np.equal(b.error, 0)
    error = np.abs(x) * (np.expm1(exponent) + 4 * model.ua * np.exp(exponent)) + model.wa
    error = np.where((a.value > 0) | is_integer, error, np.inf)
    return np.where(np.equal(a.value, 0) & np.equal(a.error, 0) & (b.value > b.error), 0, error)


def _error_of_exp(model: Arithmetic, x: Reals, a: Approximation, base: float = 1.0) -> Reals:
    """Return the propagated error plus 4 ua of the result."""
    error: Reals = np.abs(x) * np.expm1(a.error * base)
    return error + 4 * model.ua * (np.abs(x) + error) + model.wa


def _error_of_log(model: Arithmetic, x: Reals, a: Approximation, base: float = 1.0) -> Reals:
    """Return the propagated error plus 4 ua times (1 + the result)."""
    error = -np.log1p(-np.minimum(a.error / a.value, 1)) / base
    error = np.where(np.equal(a.error, 0), 0, error)
    return np.where(a.value >= a.error, error + 4 * model.ua * (1 + np.abs(x) + error), np.inf)


def _error_of_sqrt(model: Arithmetic, x: Reals, a: Approximation) -> Reals:
    """Return the propagated error plus 2 ua of the result."""
    lowest = a.value - a.error
    error = a.error / (x + np.sqrt(np.maximum(lowest, 0)))
    error = np.where(np.equal(a.value, 0), np.sqrt(a.error), error)
    error = error + 2 * model.ua * (x + error) + np.sqrt(model.wa)
    return np.where((lowest >= 0) | a.is_nonnegative, error, np.inf)


def _error_of_tanh(model: Arithmetic, x: Reals, a: Approximation, own: float | None = None) -> Reals:
    """Return the propagated error plus 8 ua, or plus the absolute error `own` of the GPU's tanh instruction."""
    nearest = np.maximum(np.abs(a.value) - a.error, 0)
    error: Reals = np.minimum(a.error / np.cosh(nearest) ** 2, 2)
    return error + (8 * model.ua if own is None else own)


def _error_of_arctan(model: Arithmetic, x: Reals, a: Approximation) -> Reals:
    """Return the propagated error plus 8 ua of the result: NumPy's own error is at most 4 ulp, and CUDA's at most 2."""
    nearest = np.maximum(np.abs(a.value) - a.error, 0)
    error: Reals = np.minimum(a.error / (1 + nearest**2), np.pi)
    return error + 8 * model.ua * (np.abs(x) + error) + model.wa


def _error_of_sign(model: Arithmetic, x: Reals, a: Approximation) -> Reals:
    return np.where((np.abs(a.value) > a.error) | np.equal(a.error, 0), 0, 2)


def _error_of_choice(
    model: Arithmetic, x: Reals, condition: Approximation, first: Approximation, second: Approximation
) -> Reals:
    """Return the error of the chosen branch, and of the other branch too if the condition may turn out either way."""
    chosen = np.where(condition.value, first.error, second.error)
    either = np.abs(np.subtract(first.value, second.value)) + np.maximum(first.error, second.error)
    return np.where(condition.error, either, chosen)


def _turns(model: Arithmetic, x: Reals, a: Approximation, b: Approximation) -> NDArray[np.bool]:
    room = a.error + b.error
    return np.greater(room, 0) & ~(np.abs(np.subtract(a.value, b.value)) > room)


def _any_turns(model: Arithmetic, x: Reals, *args: Approximation) -> NDArray[np.bool]:
    turns = np.asarray(args[0].error, bool)
    for arg in args[1:]:
        turns = turns | np.asarray(arg.error, bool)
    return turns


# Ranges and trends of integers.


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _range_of_abs(x: tuple[int, int]) -> tuple[int, int]:
    least, most = x
    return max(least, -most, 0), max(-least, most)


def _range_of_remainder(x: tuple[int, int], by: tuple[int, int]) -> tuple[int, int]:
    (least, most), divisor = x, by[0]
    is_whole = most - least < divisor and least // divisor == most // divisor
    return (least % divisor, most % divisor) if is_whole else (0, divisor - 1)


def _trend_of_product(a: int | None, b: int | None) -> tuple[int, ...]:
    """Return the sign of the constant factor, for both factors; an empty tuple if neither is constant."""
    factor = a if b is None else b
    return () if factor is None else (_sign(factor), _sign(factor))


def _extremum(name: str, order: str, fold: Callable[..., int], is_nonnegative: Callable[..., bool]) -> Primitive:
    """Return "min" or "max", which is its first argument if the comparison `order` of the arguments holds."""
    return Primitive(
        name=name, signature="number", value=getattr(np, f"{name}imum"), cuda=f"{name}imum({{}}, {{}})", fold=fold,
        derivative=(
            lambda d, g, n, a, b: d.apply("where", d.apply(order, a, b), g, d.zero),
            lambda d, g, n, a, b: d.apply("where", d.apply(order, a, b), d.zero, g),
        ),
        error=lambda model, x, a, b: np.maximum(a.error, b.error), is_nonnegative=is_nonnegative,
        trend=lambda a, b: (1, 1), has_steps=True,
    )  # fmt: skip


_LN_2 = math.log(2)
_comparison = partial(Primitive, signature="comparison", error=_turns)
_logical = partial(Primitive, signature="logical", error=_any_turns)

PRIMITIVES = {
    primitive.name: primitive
    for primitive in (
        Primitive(
            name="add", signature="number", value=np.add, cuda="{} + {}", python="{} + {}", fold=operator.add,
            derivative=(lambda d, g, n, a, b: g, lambda d, g, n, a, b: g),
            error=_error_of_sum, is_nonnegative=all, trend=lambda a, b: (1, 1),
        ),
        Primitive(
            name="sub", signature="number", value=np.subtract, cuda="{} - {}", python="{} - {}", fold=operator.sub,
            derivative=(lambda d, g, n, a, b: g, lambda d, g, n, a, b: d.negative(g)),
            error=_error_of_sum, trend=lambda a, b: (1, -1),
        ),
        Primitive(
            name="mul", signature="number", value=np.multiply, cuda="{} * {}", python="{} * {}", fold=operator.mul,
            derivative=(lambda d, g, n, a, b: d.times(g, b), lambda d, g, n, a, b: d.times(g, a)),
            error=_error_of_product, is_nonnegative=all, trend=_trend_of_product,
        ),
        Primitive(
            name="neg", signature="number", value=np.negative, cuda="-{}", python="-{}", fold=operator.neg,
            derivative=(lambda d, g, n, a: d.negative(g),), error=lambda model, x, a: a.error, trend=lambda a: (-1,),
        ),
        Primitive(
            name="abs", signature="number", value=np.absolute, traced=(np.absolute, np.fabs), cuda="absolute({})",
            python="abs({})", fold=abs, derivative=(lambda d, g, n, a: d.times(g, d.apply("sign", a)),),
            error=lambda model, x, a: a.error, is_nonnegative=lambda args: True, range=_range_of_abs,
        ),
        _extremum("min", "le", min, all),
        _extremum("max", "ge", max, any),
        Primitive(
            name="sign", signature="number", value=np.sign, cuda="sign({})", fold=lambda a: type(a)(_sign(a)),
            error=_error_of_sign,
        ),
        Primitive(
            name="div", signature="real", value=np.divide, cuda="{} / {}", python="{} / {}",
            derivative=(
                lambda d, g, n, a, b: d.over(g, b), lambda d, g, n, a, b: d.negative(d.times(d.over(g, b), n)),
            ),
            error=_error_of_quotient, is_nonnegative=all,
        ),
        Primitive(
            name="pow", signature="real", value=np.power, traced=(np.power, np.float_power),
            cuda="ptx::pow_accurate({}, {})", python="{} ** {}", derivative=(_slope_by_base, _slope_by_exponent),
            error=_error_of_power, is_nonnegative=all,
        ),
        Primitive(
            name="exp", signature="real", value=np.exp, cuda="ptx::exp_accurate({})",
            derivative=(lambda d, g, n, a: d.times(g, n),),
            error=_error_of_exp, is_nonnegative=lambda args: True, is_special=True,
        ),
        Primitive(
            name="exp2", signature="real", value=np.exp2, cuda="ptx::exp2_accurate({})",
            derivative=(lambda d, g, n, a: d.times(d.times(g, n), d.const(_LN_2)),),
            error=partial(_error_of_exp, base=_LN_2), is_nonnegative=lambda args: True, is_special=True,
        ),
        Primitive(
            name="log", signature="real", value=np.log, cuda="ptx::log_accurate({})",
            derivative=(lambda d, g, n, a: d.over(g, a),), error=_error_of_log, is_special=True,
        ),
        Primitive(
            name="log2", signature="real", value=np.log2, cuda="ptx::log2_accurate({})",
            derivative=(lambda d, g, n, a: d.over(d.times(g, d.const(1 / _LN_2)), a),),
            error=partial(_error_of_log, base=_LN_2), is_special=True,
        ),
        Primitive(
            name="tanh", signature="real", value=np.tanh, cuda="tangent({})", derivative=(_slope_of_tanh,),
            error=_error_of_tanh, is_special=True,
        ),
        Primitive(
            name="tanh_fast", signature="real", value=np.tanh, traced=(), cuda="tangent_fast({})",
            derivative=(_slope_of_tanh,), error=partial(_error_of_tanh, own=2.0**-10.9), is_special=True,
        ),
        Primitive(
            name="arctan", signature="real", value=np.arctan, cuda="::atan({})",
            derivative=(lambda d, g, n, a: d.over(g, d.apply("add", d.one, d.apply("mul", a, a))),),
            error=_error_of_arctan,
        ),
        Primitive(
            name="sqrt", signature="real", value=np.sqrt, cuda="ptx::sqrt_accurate({})",
            derivative=(lambda d, g, n, a: d.over(d.times(g, d.const(0.5)), n),),
            error=_error_of_sqrt, is_nonnegative=lambda args: True, is_special=True,
        ),
        # 1 / (1 + 2^x), from which `scores.products` computes tanh.
        Primitive(
            name="logistic", signature="real", value=lambda x: 1 / (1 + np.exp2(x)), traced=(), cuda="logistic({})",
        ),
        Primitive(
            name="floordiv", signature="whole", value=np.floor_divide, cuda="floor_divide({}, {})",
            python="{} // {}", fold=operator.floordiv, trend=lambda a, b: (1, 1), has_steps=True,
        ),
        Primitive(
            name="mod", signature="whole", value=np.remainder, cuda="remainder({}, {})", python="{} % {}",
            fold=operator.mod, range=_range_of_remainder,
        ),
        _comparison(name="lt", value=np.less, cuda="{} < {}", python="{} < {}", fold=operator.lt),
        _comparison(name="le", value=np.less_equal, cuda="{} <= {}", python="{} <= {}", fold=operator.le),
        _comparison(name="eq", value=np.equal, cuda="{} == {}", python="{} == {}", fold=operator.eq),
        _comparison(name="ne", value=np.not_equal, cuda="{} != {}", python="{} != {}", fold=operator.ne),
        _comparison(name="gt", value=np.greater, cuda="{} > {}", python="{} > {}", fold=operator.gt),
        _comparison(name="ge", value=np.greater_equal, cuda="{} >= {}", python="{} >= {}", fold=operator.ge),
        _logical(
            name="and", value=np.logical_and, traced=(np.logical_and, np.bitwise_and), cuda="{} & {}",
            python="{} & {}", fold=operator.and_,
        ),
        _logical(
            name="or", value=np.logical_or, traced=(np.logical_or, np.bitwise_or), cuda="{} | {}", python="{} | {}",
            fold=operator.or_,
        ),
        _logical(
            name="not", value=np.logical_not, traced=(np.logical_not, np.invert), cuda="!{}", python="~{}",
            fold=operator.not_,
        ),
        Primitive(
            name="isfinite", signature="test", value=np.isfinite, cuda="is_finite({})",
            error=lambda model, x, a: np.isinf(a.error),
        ),
        Primitive(
            name="where", signature="choice", value=np.where, cuda="{} ? {} : {}",
            derivative=(
                None, lambda d, g, n, a, b, c: d.apply("where", a, g, d.zero),
                lambda d, g, n, a, b, c: d.apply("where", a, d.zero, g),
            ),
            error=_error_of_choice, is_nonnegative=lambda args: all(args[1:]),
            range=lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
        ),
    )
}  # fmt: skip
