"""The checked shapes, dtype and scale of a call, without its data, its mask or a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays import (
    DTYPES, Array, ShapeDtype, accumulator_dtype, as_number, describe, is_array, is_finite, is_flag, is_number,
    no_array,
)  # fmt: skip
from ..dropout import Draws
from ..errors import UnsupportedProblem, collecting, refuse
from ..layouts import is_differentiated
from ..masks.content import Memoized
from ..masks.places import Places
from ..masks.shape import MaskShape, length_reasons
from ..scores.program import Program
from ..scores.score import Score
from .dropout_launches import SEED, dropout_of
from .operands import Operand, operands_of, wrt_of
from .options import DOT
from .scales import RowsPerScale
from .score_operands import captured_operands, numbers_of

MAX_HEAD_DIM = 256
PRECISIONS = ("ieee", "tf32", "tf32x3")
FP8 = "fp8"  # the precision of problems of `Quantized` operands; calls cannot request it by name
_MAX_EXPONENT = 64  # scales up to 2^64 multiply float32 products directly; for float64 products, up to 2^512
ArrayLayout: TypeAlias = tuple[tuple[int, ...], np.dtype[np.generic]]  # the shape and dtype of an array


class Scaling(NamedTuple):
    """The scale as executors apply it: a factor of q . k, and exponents of powers of two that multiply q and k."""

    scale: float
    q_exponent: int
    k_exponent: int


@dataclass(frozen=True, kw_only=True)
class Problem(Memoized):
    """Everything about a call except its mask and its data.

    >>> import numpy as np
    >>> q = k = v = np.zeros((2, 8, 128, 64), np.float32)
    >>> problem = Problem.of(q, k, v)
    >>> problem.batch, problem.num_heads, problem.seqlen_kv, problem.softmax_scale
    ((2,), 8, 128, 0.125)

    Attributes
    ----------
    q_batch, k_batch, v_batch, batch : tuple of int
        The leading axes of each argument, and the shape to which they broadcast.
    num_heads, num_kv_heads : int
        Query head h reads key/value head h // (num_heads / num_kv_heads).
    has_heads : bool
        False for 2-D arguments (seqlen, head_dim).
    softmax_scale : float
        The factor of q . k. Default: 1 / sqrt(head_dim). If it is outside 2^-64 to 2^64 (2^-512 to 2^512 for float64),
        powers of two are factored out of it and multiplied with q and k first, so that a product overflows or
        underflows only if its score does. Products of float16 numbers do neither; a scale above 2^126 becomes 2^126.
    precision : "ieee", "tf32", "tf32x3" or "fp8"
        Precision of the matrix products.
    operands : tuple of Operand
        Arrays other than q, k and v.
    wrt : tuple of str
        Names of the operands that have gradients.
    score : Program, optional
        The score function; the arrays that it reads are the captured operands.
    numbers : tuple of float
        Numbers that the program reads. They are arguments of kernels, so that the machine code does not depend on them.
    dropout : Draws, optional
        How the dropped weights are drawn.
    rows_per_scale : RowsPerScale, optional
        Rows that share a scale, if q, k and v are FP8 (e4m3); `dtype` is then the dtype of o.
    tangents : tuple of str
        Names of arrays that have tangents.
    places : Places, optional
        The place of the arrays in a larger call, whose positions the score function and dropout see; None for a call
        that is not a part of a larger one.
    wide_gradients : bool
        dk and dv are in the accumulator's dtype, to be added to those of other calls before they are rounded.
    """

    q_batch: tuple[int, ...]
    k_batch: tuple[int, ...]
    v_batch: tuple[int, ...]
    batch: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    value_dim: int
    has_heads: bool
    dtype: np.dtype[np.generic]
    softmax_scale: float
    precision: str = "ieee"
    operands: tuple[Operand, ...] = ()
    wrt: tuple[str, ...] = ()
    score: Program | None = None
    numbers: tuple[float, ...] = ()
    dropout: Draws | None = None
    rows_per_scale: RowsPerScale | None = None
    tangents: tuple[str, ...] = ()
    places: Places | None = None
    wide_gradients: bool = False

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, *, scale: float | None = None, precision: str = "ieee"
    ) -> Problem:
        """Return the problem of these arguments (arrays or `ShapeDtype`).

        Raises
        ------
        TypeError
            An argument is not an array of a known kind.
        UnsupportedProblem
            The arguments are invalid or not supported. The message lists all reasons.
        """
        arguments = {"q": q, "k": k, "v": v}
        for name, array in arguments.items():
            if not (is_array(array) or isinstance(array, ShapeDtype)):
                raise TypeError(no_array(name, array))
        reasons = array_reasons(arguments) + _scale_reasons(scale) + precision_reasons(q, precision)
        if not _rank_reasons(arguments):
            reasons += _shape_reasons(q, k, v)
        refuse(reasons)
        has_heads = q.ndim > 2
        head_dim = int(q.shape[-1])
        return cls(
            q_batch=_ints(q.shape[:-3]),
            k_batch=_ints(k.shape[:-3]),
            v_batch=_ints(v.shape[:-3]),
            batch=np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]),
            num_heads=int(q.shape[-3]) if has_heads else 1,
            num_kv_heads=int(k.shape[-3]) if has_heads else 1,
            seqlen_q=int(q.shape[-2]),
            seqlen_kv=int(k.shape[-2]),
            head_dim=head_dim,
            value_dim=int(v.shape[-1]),
            has_heads=has_heads,
            dtype=np.dtype(q.dtype),
            softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else float(as_number(scale)),
            precision=precision,
        )

    @cached_property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @cached_property
    def num_batch_heads(self) -> int:
        """Pairs of batch entry and query head."""
        return math.prod(self.batch) * self.num_heads

    @cached_property
    def mask_shape(self) -> MaskShape:
        return MaskShape(self.batch, self.num_heads, self.seqlen_q, self.seqlen_kv)

    @property
    def whole_shape(self) -> MaskShape:
        """The shape of the larger call, which limits the positions that score functions and masks see."""
        return self.mask_shape if self.places is None else self.places.whole(self.mask_shape)

    @cached_property
    def accumulator(self) -> np.dtype[np.generic]:
        return accumulator_dtype(self.dtype)

    @cached_property
    def scaling(self) -> Scaling:
        """The factors that executors apply: to q . k only, or also to q and k if the scale is far from 1."""
        scale = self.softmax_scale
        if self.dtype == np.float16:  # 2^126 log2(e) is finite in float32
            return Scaling(max(-(2.0**126), min(scale, 2.0**126)), 0, 0)
        most = _MAX_EXPONENT if self.accumulator == np.float32 else 8 * _MAX_EXPONENT
        mantissa, exponent = math.frexp(scale)
        if not scale or -most < exponent <= most:
            return Scaling(scale, 0, 0)
        return Scaling(mantissa, exponent // 2, exponent - exponent // 2)

    @property
    def kernel_scale(self) -> float:
        """The factor of q . k in kernels: 0 if it underflows in the accumulator's dtype, where all scores are tiny."""
        scale = self.scaling.scale
        return scale if abs(scale) >= 2 * float(np.finfo(self.accumulator.name).tiny) else 0.0

    def o_shape(self) -> tuple[int, ...]:
        """Return (*batch, num_heads, seqlen_q, value_dim), without num_heads for 2-D arguments."""
        return (*self.lse_shape(), self.value_dim)

    def lse_shape(self) -> tuple[int, ...]:
        """Return (*batch, num_heads, seqlen_q), without num_heads for 2-D arguments."""
        return (*self.batch, self.num_heads, self.seqlen_q) if self.has_heads else (self.seqlen_q,)

    def heads_shape(self) -> tuple[int, ...]:
        """Return (*batch, num_heads); (1,) for 2-D arguments."""
        return (*self.batch, self.num_heads)

    def operand(self, name: str) -> Operand | None:
        """Return the operand with this name, or None if the problem has no such operand."""
        for operand in self.operands:
            if operand.name == name:
                return operand
        return None

    def keyed(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays of a call, and their tangents, under the names that executors use."""
        keys = {}
        for operand in self.operands:
            keys[operand.name], keys[operand.name + DOT] = operand.key, operand.key + DOT
        return {keys.get(name, name): array for name, array in arrays.items()}

    def is_of_forward(self, name: str) -> bool:
        """True if the backward pass does not read this operand."""
        operand = self.operand(name)
        return operand is not None and not operand.is_captured and name not in (*self.wrt, SEED)

    def argument_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of q, k and v as the caller passed them."""
        heads_q, heads_kv = ((self.num_heads,), (self.num_kv_heads,)) if self.has_heads else ((), ())
        return {
            "q": (*self.q_batch, *heads_q, self.seqlen_q, self.head_dim),
            "k": (*self.k_batch, *heads_kv, self.seqlen_kv, self.head_dim),
            "v": (*self.v_batch, *heads_kv, self.seqlen_kv, self.value_dim),
        }

    def array_layouts(self) -> dict[str, ArrayLayout]:
        """Return the shape and dtype of each array that a pass may take, by name."""
        like_o, like_lse = (self.o_shape(), self.dtype), (self.lse_shape(), self.accumulator)
        return {
            **{name: (shape, self.dtype) for name, shape in self.argument_shapes().items()},
            **{operand.name: (operand.shape, operand.dtype) for operand in self.operands},
            **{"o": like_o, "do": like_o, f"o{DOT}": like_o},
            **{"lse": like_lse, "dlse": like_lse, f"lse{DOT}": like_lse},
        }

    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of dq, dk and dv over the whole batch, before sums over broadcast axes."""
        if not self.has_heads:
            return self.argument_shapes()
        return {name: (*self.batch, *shape[-3:]) for name, shape in self.argument_shapes().items()}


def problem_of(
    reasons: list[str], q: Array, k: Array, v: Array, *, scale: Any = None, precision: Any = "ieee"
) -> Problem | None:
    """Return the problem of q, k and v, or None if they are invalid; append all reasons to `reasons`.

    If only the scale is invalid, return the problem with the default scale, so that other checks still run.
    """
    with collecting(reasons):
        return Problem.of(q, k, v, scale=scale, precision=precision)
    if scale is not None:
        with suppress(UnsupportedProblem):
            return Problem.of(q, k, v, precision=precision)
    return None


def with_operands(
    problem: Problem, arrays: Mapping[str, Array], wrt: Any = (), score: Score | None = None, dropout: Any = None
) -> Problem:
    """Add the operands of a call, arrays or `ShapeDtype` by name, to its problem; None stands for a missing array.

    The arrays that a score function captures become operands too, and so does an array with the seed of a `Dropout`.

    Raises
    ------
    TypeError
        An operand is not an array of a known kind.
    UnsupportedProblem
        An operand does not fit the problem, or `wrt` does not name arrays of the call. The message lists all reasons.
    """
    reasons = list[str]()
    operands, numbers = tuple[Operand, ...](), tuple[float, ...]()
    with collecting(reasons):
        operands = operands_of(arrays, problem.heads_shape())
    if score is not None:
        with collecting(reasons):
            operands += captured_operands(score, problem.whole_shape, problem.has_heads, problem.accumulator)
        with collecting(reasons):
            numbers = numbers_of(score, problem.whole_shape, problem.accumulator)
    draws, seeds = None, tuple[Operand, ...]()
    if dropout is not None:
        with collecting(reasons):
            draws, seeds = dropout_of(dropout)
    names = [name for name, array in arrays.items() if array is not None]
    captured = () if score is None else score.program.arrays
    integers = [array.name for array in captured if array.kind != "real"]
    with collecting(reasons):
        wrt = wrt_of(wrt, [*names, *(array.name for array in captured if array.name not in integers)], integers)
    refuse(reasons)
    problem = replace(problem, operands=operands + seeds, wrt=wrt, dropout=draws)
    return problem if score is None else replace(problem, score=score.program, numbers=numbers)


def _ints(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(extent) for extent in shape)


def array_reasons(arguments: Mapping[str, Array]) -> list[str]:
    """Return why arrays, by name, cannot belong to one call: their ranks, dtypes or batch axes do not fit."""
    reasons = _rank_reasons(arguments)
    return reasons + _dtype_reasons(arguments) + ([] if reasons else _batch_reasons(arguments))


def reasons_without_v(reasons: list[str], q: Array, k: Array, planned: tuple[Array, Array, Array]) -> list[str]:
    """Return the reasons to refuse q and k: their own, and those in `reasons` that do not come from `planned`."""
    of_planned = array_reasons(dict(zip("qkv", planned)))
    return array_reasons({"q": q, "k": k}) + [reason for reason in reasons if reason not in of_planned]


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}"


def _batch_reasons(arguments: Mapping[str, Array]) -> list[str]:
    leading = [tuple(array.shape[:-3]) for array in arguments.values()]
    try:
        np.broadcast_shapes(*leading)
    except ValueError:
        got = ", ".join(map(str, leading))
        return [f"the axes before heads of {_listed(arguments)} must broadcast by NumPy's rules; got {got}"]
    return []


def _rank_reasons(arguments: Mapping[str, Array]) -> list[str]:
    reasons = [
        f"{name} must have shape (..., heads, seqlen, dim) or (seqlen, dim); got {tuple(array.shape)}"
        for name, array in arguments.items()
        if array.ndim < 2
    ]
    if not reasons and len({array.ndim > 2 for array in arguments.values()}) > 1:
        ranks = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arguments.items())
        names = _listed(arguments)
        reasons.append(f"{names} must all have an axis of heads, or none of them; got {ranks}: x[None] adds the axis")
    return reasons


def _dtype_reasons(arguments: Mapping[str, Array]) -> list[str]:
    dtypes = {name: np.dtype(array.dtype) for name, array in arguments.items()}
    reasons = [
        f"{name}'s dtype must be one of {', '.join(known.name for known in DTYPES)}; "
        f"got {dtype.str if not dtype.isnative else dtype}: cast it to {_nearest(dtype)}"
        for name, dtype in dtypes.items()
        if dtype not in DTYPES
    ]
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        reasons.append(f"{_listed(dtypes)} must share one dtype; got {listed}: cast them to one")
    return reasons


def _nearest(dtype: np.dtype[np.generic]) -> str:
    """Return a supported dtype as a substitute: the same dtype in native byte order if supported, else float32."""
    native = dtype.newbyteorder("=")
    return native.name if native in DTYPES else "float32"


def _scale_reasons(scale: Any) -> list[str]:
    number = as_number(scale)
    if scale is None or is_finite(number):
        return []
    fix = ""
    if "Tracer" in type(scale).__name__:  # a traced value of JAX
        fix = ": name it in static_argnames, or multiply q by it"
    elif is_differentiated(scale):
        fix = ": pass float(scale), or score=cuflash.scores.temperature(per_head) for a scale that has a gradient"
    elif hasattr(scale, "__float__") and not is_flag(number) and not is_number(number):
        fix = ": pass float(scale)"
    return [f"scale must be a finite number or None; got {describe(scale)}{fix}"]


def precision_reasons(q: Array, precision: str) -> list[str]:
    """Return why products of q's dtype cannot be computed at a precision."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        is_fp8 = isinstance(precision, str) and precision == FP8
        fix = ": pass cuflash.quantize(q), and likewise for k and v" if is_fp8 else ""
        return [f"precision must be {', '.join(map(repr, PRECISIONS))}; got {describe(precision)}{fix}"]
    dtype = getattr(q, "dtype", np.float32)  # a check elsewhere refuses objects that are not arrays
    if precision != "ieee" and dtype != np.float32:
        return [f"precision={precision!r} is for float32; got {dtype}: use precision='ieee'"]
    return []


def _shape_reasons(q: Array, k: Array, v: Array) -> list[str]:
    """Return why the shapes of q, k and v do not fit together; their ranks must be valid."""
    reasons = []
    for name, array, what in (("q", q, "head_dim"), ("v", v, "value dim")):
        if not 1 <= array.shape[-1] <= MAX_HEAD_DIM:
            reasons.append(f"{name}'s last axis ({what}) must be 1..{MAX_HEAD_DIM}; got shape {tuple(array.shape)}")
    if k.shape[-1] != q.shape[-1]:
        reasons.append(f"k must have q's head_dim={q.shape[-1]} as its last axis; got shape {tuple(k.shape)}")
    if v.shape[-2] != k.shape[-2]:
        reasons.append(f"v must have k's seqlen_kv={k.shape[-2]} as its axis -2; got shape {tuple(v.shape)}")
    reasons += length_reasons(MaskShape((), 1, q.shape[-2], k.shape[-2]))
    if q.ndim > 2:
        reasons += _head_reasons(q, k, v)
    return reasons


def _head_reasons(q: Array, k: Array, v: Array) -> list[str]:
    num_heads, num_kv_heads = q.shape[-3], k.shape[-3]
    reasons = []
    if v.shape[-3] != num_kv_heads:
        reasons.append(f"v must have k's {num_kv_heads} heads on axis -3; got shape {tuple(v.shape)}")
    if num_kv_heads != num_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        reasons.append(
            f"q's {num_heads} heads must be a multiple of k's {num_kv_heads}, since consecutive query heads share a "
            f"key/value head"
        )
    return reasons
