"""Calls the decode kernel for a cache, where the kernel serves the call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, is_array
from ..compiler import nvrtc
from ..errors import UnsupportedProblem
from ..executors import gpu
from ..layouts import address, device_number, layout_reasons
from ..planning.decoding import CacheLayout, DecodePlan, chunk_reasons, decode_plan, decode_reasons
from ..planning.device import DeviceSpec
from ..planning.families.sm80 import DECODING
from ..planning.problem import Problem, with_operands
from .scoring import ScoreKind

_KERNELS = ("auto", DECODING.family)  # names of families under which the decode kernel runs
_SIMULATED = DeviceSpec.gpu("H100")


class DecodeOptions(NamedTuple):
    """The arguments of `KVCache.attention` that decide whether the decode kernel serves a call.

    Attributes
    ----------
    left, right : int, optional
        Keys before and after a query's own position that it sees; None is unlimited.
    scale, kernel, executor, precision
        As in `cuflash.attention`.
    part_keys : int, optional
        Keys of a part, whatever the length of its sequence.
    score : ScoreKind, optional
        The score function without its arrays.
    """

    left: int | None
    right: int | None
    scale: Any
    kernel: Any
    executor: Any
    precision: Any
    part_keys: int | None = None
    score: ScoreKind | None = None


def decode_plan_of(
    arrays: dict[str, Array | None], layout: CacheLayout, options: DecodeOptions
) -> DecodePlan | None:
    """The plan of the decode kernel for a call; None where the kernel does not serve it.

    Parameters
    ----------
    arrays : dict by name
        q, k, v, o, lse and sink, as `executors.decoding.bound_decode` takes them, and scales of 8-bit numbers.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    device = device_of(options, given, _KERNELS)
    if device is None or not has_layout(given):
        return None
    try:
        return _plan(*shapes_of(given), layout, device, options, "k_scale" in given)
    except (UnsupportedProblem, TypeError):  # `attention` says all that is wrong with a call
        return None


def device_of(options: DecodeOptions, given: dict[str, Array], kernels: tuple[str, ...]) -> DeviceSpec | None:
    """The device whose kernels would run on what is given; None where there is none.

    Parameters
    ----------
    kernels : tuple of str
        Names under which the kernels may be asked for.
    """
    names = options.executor, options.kernel, options.precision
    if not all(isinstance(name, str) for name in names) or options.kernel not in kernels:
        return None
    if not all(map(is_array, given.values())):
        return None
    of_arrays = ("cpu", "sim") if isinstance(given["q"], np.ndarray) else ("gpu",)
    executor = of_arrays[0] if options.executor == "auto" else options.executor
    if executor not in of_arrays or executor == "cpu":
        return None
    return gpu.current_device() if executor == "gpu" else _SIMULATED


def shapes_of(given: dict[str, Array]) -> tuple[ShapeDtype, ShapeDtype, ShapeDtype, ShapeDtype | None]:
    """Shapes and dtypes of q, k, v and the sink."""
    shapes = {name: ShapeDtype(array.shape, array.dtype) for name, array in given.items()}
    return shapes["q"], shapes["k"], shapes["v"], shapes.get("sink")


@lru_cache(maxsize=256)
def _plan(
    q: ShapeDtype,
    k: ShapeDtype,
    v: ShapeDtype,
    sink: ShapeDtype | None,
    layout: CacheLayout,
    device: DeviceSpec,
    options: DecodeOptions,
    is_quantized: bool,
) -> DecodePlan | None:
    """The kernel's plan for pages of q's dtype, or of 8-bit numbers; None where it does not serve the problem."""
    k, v = (ShapeDtype(x.shape, q.dtype) if is_quantized else x for x in (k, v))
    problem = problem_of(q, k, v, sink, layout, options)
    if problem is None or decode_reasons(problem, device, is_quantized=is_quantized):
        return None
    return decode_plan(
        problem, device, layout, left=options.left, right=options.right, part_keys=options.part_keys,
        is_quantized=is_quantized,
    )  # fmt: skip


def problem_of(
    q: ShapeDtype, k: ShapeDtype, v: ShapeDtype, sink: ShapeDtype | None, layout: CacheLayout, options: DecodeOptions
) -> Problem | None:
    """The problem of keys and values as long as the capacity; None with a sink that is not one number a head.

    Raises
    ------
    UnsupportedProblem
        There is none, or its score function's arrays do not fit it.
    """
    if sink is not None and sink.ndim != 1:
        return None
    longest = (ShapeDtype((q.shape[0], x.shape[1], layout.capacity, x.shape[3]), x.dtype) for x in (k, v))
    problem = with_operands(Problem.of(q, *longest, scale=options.scale, precision=options.precision), {"sink": sink})
    return problem if options.score is None else options.score.of(problem)


def has_layout(given: dict[str, Array]) -> bool:
    """Tell whether kernels can walk arrays, all of which lie on the current device or on the host."""
    if any(layout_reasons(name, array) for name, array in given.items()):
        return False
    for name in ("k", "v"):
        array = given[name]
        if chunk_reasons(name, array.strides, array.dtype.itemsize, address(array)):
            return False
    places = {device_number(array) for array in given.values()}
    return places == {None} or places == {nvrtc.current_device()[1]}
