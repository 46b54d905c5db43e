"""Where a plan meets arrays: checks them, allocates results, and hands both to an executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import cpu, gpu, simulated
from .arrays import Array, describe, is_array, namespace
from .errors import UnsupportedProblem
from .plans import Plan

EXECUTORS: dict[str, Any] = {"cpu": cpu, "gpu": gpu, "sim": simulated}


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of one call; unpacks to dq, dk, dv.

    >>> dq, dk, dv = Gradients("dq", "dk", "dv")

    Attributes
    ----------
    dq, dk, dv : array
        Of the shapes and the dtype of q, k and v; summed over the axes that were broadcast.
    """

    dq: Array
    dk: Array
    dv: Array

    def __iter__(self) -> Iterator[Array]:
        return iter((self.dq, self.dk, self.dv))


@dataclass(frozen=True, eq=False)
class Executable:
    """A plan ready to run: what `cuflash.plan` returns.

    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 16, 8), np.float32)
    >>> ready = cuflash.plan(q, k, v, causal=True)
    >>> o, lse = ready.forward(q, k, v)
    >>> o.shape, lse.shape
    ((2, 16, 8), (2, 16))

    Attributes
    ----------
    plan : Plan
        Problem, mask, device, tile and work.
    executor : str
        "cpu", "gpu" or "sim".
    """

    plan: Plan
    executor: str = field(default="cpu")

    def forward(self, q: Array, k: Array, v: Array, out: Any = None) -> tuple[Array, Array]:
        """o and lse of these arrays.

        Parameters
        ----------
        q, k, v : arrays of the planned shapes and dtype, any strides
        out : array, or pair of arrays (o, lse), optional
            Written to instead of new arrays.

        Raises
        ------
        UnsupportedProblem
            An array is not what was planned; all reasons at once.
        """
        problem = self.plan.problem
        given = {"q": q, "k": k, "v": v}
        out_o, out_lse = out if isinstance(out, (tuple, list)) and len(out) == 2 else (out, None)
        reasons = self._input_reasons(given)
        reasons += _output_reasons(
            "out" if out_lse is None else "out[0]", out_o, problem.o_shape(), problem.dtype, given
        )
        reasons += _output_reasons("out[1]", out_lse, problem.lse_shape(), problem.accumulator, given)
        if out_o is not None and out_lse is not None and not reasons and _overlap(out_o, out_lse):
            reasons.append("out[0] and out[1] must not overlap in memory: give each its own")
        if reasons:
            raise UnsupportedProblem(reasons)
        xp = namespace(q)
        o = xp.empty(problem.o_shape(), problem.dtype) if out_o is None else out_o
        lse = xp.empty(problem.lse_shape(), problem.accumulator) if out_lse is None else out_lse
        EXECUTORS[self.executor].forward(self.plan, q, k, v, o, lse)
        return o, lse

    def backward(
        self, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, dlse: Array | None = None
    ) -> Gradients:
        """Gradients of sum(do * o) + sum(dlse * lse).

        Parameters
        ----------
        do : array of o's shape and dtype, any strides
        q, k, v, o, lse : what `forward` took and returned
        dlse : array of lse's shape and dtype, optional

        Raises
        ------
        UnsupportedProblem
            An array is not what was planned; all reasons at once.
        """
        problem = self.plan.problem
        given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
        if dlse is not None:
            given["dlse"] = dlse
        reasons = self._input_reasons(given)
        if reasons:
            raise UnsupportedProblem(reasons)
        shapes = problem.argument_shapes()
        heads = {"q": problem.num_heads, "k": problem.num_kv_heads, "v": problem.num_kv_heads}
        results, xp = {}, namespace(q)
        for name, shape in shapes.items():
            full = (*problem.batch, heads[name], *shape[-2:]) if problem.has_heads else shape
            results[name] = xp.empty(full, problem.dtype if full == shape else problem.accumulator)
        given_and_made = (do, q, k, v, o, lse, dlse, *results.values())
        EXECUTORS[self.executor].backward(self.plan, *given_and_made)
        return Gradients(*(_summed_to(results[name], shapes[name], problem.dtype) for name in ("q", "k", "v")))

    @property
    def workspace_bytes(self) -> int:
        """Memory a call takes beside its inputs and outputs; `Plan.workspace_bytes` has the formula."""
        return self.plan.workspace_bytes

    def explain(self) -> str:
        """What was decided and why, a line each."""
        return "\n".join([f"executor   {self.executor}", self.plan.explain()])

    def compile(self) -> None:
        """Make everything ready that the first call would otherwise make: here the transposed work list."""
        getattr(self.plan.work, "transposed", None)

    def _input_reasons(self, given: dict[str, Array]) -> list[str]:
        problem = self.plan.problem
        wanted = {
            **{name: (shape, problem.dtype) for name, shape in problem.argument_shapes().items()},
            "o": (problem.o_shape(), problem.dtype),
            "do": (problem.o_shape(), problem.dtype),
            "lse": (problem.lse_shape(), problem.accumulator),
            "dlse": (problem.lse_shape(), problem.accumulator),
        }
        reasons = []
        for name, array in given.items():
            if not is_array(array):
                raise TypeError(f"{name} must be an array; got {describe(array)}: numpy.asarray makes one")
            shape, dtype = wanted[name]
            reasons += self._place_reasons(name, array)
            if tuple(array.shape) != shape or array.dtype != dtype:
                reasons.append(
                    f"{name} must have shape {shape} and dtype {dtype}; got {tuple(array.shape)} and {array.dtype}"
                )
        return reasons

    def _place_reasons(self, name: str, array: Array) -> list[str]:
        """Why the executor cannot reach an array."""
        home = "cupy" if self.executor == "gpu" else "numpy"
        if namespace(array).__name__ == home:
            return []
        return [
            f"{name} must be a {home} array for executor={self.executor!r}; "
            f"got {type(array).__module__.partition('.')[0]}.{type(array).__name__}: copy it with {home}.asarray"
        ]


def _output_reasons(name: str, array: Any, shape: tuple[int, ...], dtype: Any, inputs: dict[str, Array]) -> list[str]:
    """Why an array cannot be written to as a result."""
    if array is None:
        return []
    if not isinstance(array, np.ndarray):
        return [f"{name} must be a NumPy array of shape {shape} and dtype {dtype}; got {describe(array)}"]
    reasons = []
    if array.shape != shape or array.dtype != dtype:
        reasons.append(f"{name} must have shape {shape} and dtype {dtype}; got {array.shape} and {array.dtype}")
    if not array.flags.writeable:
        reasons.append(f"{name} must be writeable; got a read-only array")
    if array.size and any(stride == 0 and extent > 1 for stride, extent in zip(array.strides, array.shape)):
        reasons.append(f"{name} must not be a broadcast view; got strides {array.strides}: give an array of its own")
    for other, value in inputs.items():
        if isinstance(value, np.ndarray) and _overlap(array, value):
            reasons.append(f"{name} must not overlap {other} in memory: give an array of its own")
    return reasons


def _overlap(first: Array, second: Array) -> bool:
    """Whether two arrays share any element; yes where that would be hard to tell."""
    try:
        return bool(np.shares_memory(first, second, max_work=1 << 16))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _summed_to(gradient: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Sum over the leading axes that were broadcast, and round once."""
    if gradient.shape == shape:  # a sum over no axes would copy
        return gradient.astype(dtype, copy=False)
    missing = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(missing)))
    axes = tuple(axis for axis, extent in enumerate(shape) if extent == 1 and gradient.shape[axis] != 1)
    with np.errstate(over="ignore"):  # what float16 cannot hold becomes inf, as in the results that need no sum
        return gradient.sum(axis=axes, keepdims=True).astype(dtype, copy=False).reshape(shape)
