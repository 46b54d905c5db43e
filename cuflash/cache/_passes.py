"""The kernels of a call on a cache: for a few new tokens, or for many, where they serve the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, is_array
from ..compiler import nvrtc
from ..errors import UnsupportedProblem
from ..executors import gpu
from ..executors._records import View
from ..executors.launch import run_alone
from ..executors.sim import Simulator
from ..layouts import address, device_number, layout_reasons
from ..planning.decoding import MOST_ROWS, CacheLayout, chunk_reasons, decode_pass, decode_reasons
from ..planning.device import DeviceSpec
from ..planning.families.sm80 import DECODING
from ..planning.launches import Pass
from ..planning.prefill import prefill_pass, prefill_reasons
from ..planning.problem import Problem, with_operands
from ..planning.routing import PREFILL_FAMILIES
from ..scores import Score
from .scoring import ScoreKind, arrays_of
from ._state import CacheState
from .steps import AttendStep

# What may be asked for, and of the decode kernel.
_KERNELS, _OF_DECODE = ("auto", *PREFILL_FAMILIES), ("auto", DECODING.family)
_SIMULATED = DeviceSpec.gpu("H100")


class DecodeOptions(NamedTuple):
    """The arguments of `KVCache.attention` that decide which kernels serve a call.

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
    scale: float | None
    kernel: str
    executor: str
    precision: str
    part_keys: int | None = None
    score: ScoreKind | None = None


class SimulatedStep(AttendStep):
    """The decode kernel, or those of many new tokens, on the simulator.

    Parameters
    ----------
    kernels : Pass
    arrays : dict by name
        As `pass_of` takes them.
    captured : sequence of str
        The names of the score function's arrays.
    """

    def __init__(self, kernels: Pass, arrays: Mapping[str, Any], captured: Sequence[str]) -> None:
        super().__init__(arrays, captured)
        self._kernels = kernels

    def attend(
        self, cache: CacheState, q: Array, o: Array, lse: Array | None, counts: Sequence[int] | None,
        sink: Array | None, score: Score | None,
    ) -> None:  # fmt: skip
        """Write o and lse; of q's rows the first `counts` belong to each sequence, and None stands for all."""
        arrays = {
            "q": q, "k": cache.rows.k, "v": cache.rows.v, "sink": sink,
            "o": o, "lse": self.make_lse() if lse is None else lse,
            "table": cache.block_table() if cache.is_paged else None, "lengths": cache.length_array(),
            "counts": None if counts is None else np.array(counts, np.int32), "num_faults": np.zeros(1, np.int32),
        }  # fmt: skip
        captured = {} if score is None else arrays_of(score)
        run_alone(self._kernels, arrays | cache.rows.scales | captured, Simulator())


def pass_of(arrays: dict[str, Array | None], layout: CacheLayout, options: DecodeOptions) -> Pass | None:
    """The decode kernel, or the kernels for many new tokens of the first family that serves a call; None if none does.

    Parameters
    ----------
    arrays : dict by name
        q, k, v, o, lse and sink, scales of 8-bit numbers, and arrays of the score function.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    device = _device_of(options, given)
    if device is None or not _has_layout(given):
        return None
    shapes = {name: ShapeDtype(array.shape, array.dtype) for name, array in given.items()}
    q, k, v = (shapes[name] for name in "qkv")
    try:
        passes = _passes(q, k, v, shapes.get("sink"), layout, device, options, "k_scale" in given)
    except (UnsupportedProblem, TypeError):  # `attention` says all that is wrong with a call
        return None
    return next((kernels for kernels in passes if _has_maps(kernels, given)), None)


def _has_maps(kernels: Pass, given: dict[str, Array]) -> bool:
    """Tell whether the hardware copies boxes of keys and values, where the kernels have it do so."""
    boxes = [each for feature in kernels.features for each in feature.boxes.values() if each[0] in ("k", "v")]
    return not any(View.of(name, given[name]).boxes(box).reasons(address=0) for name, box in boxes)


def _device_of(options: DecodeOptions, given: dict[str, Array]) -> DeviceSpec | None:
    """The device whose kernels would run on what is given; None where there is none."""
    names = options.executor, options.kernel, options.precision
    if not all(isinstance(name, str) for name in names) or options.kernel not in _KERNELS:
        return None
    if not all(map(is_array, given.values())):
        return None
    of_arrays = ("cpu", "sim") if isinstance(given["q"], np.ndarray) else ("gpu",)
    executor = of_arrays[0] if options.executor == "auto" else options.executor
    if executor not in of_arrays or executor == "cpu":
        return None
    return gpu.current_device() if executor == "gpu" else _SIMULATED


@lru_cache(maxsize=256)
def _passes(
    q: ShapeDtype, k: ShapeDtype, v: ShapeDtype, sink: ShapeDtype | None, layout: CacheLayout, device: DeviceSpec,
    options: DecodeOptions, is_quantized: bool,
) -> tuple[Pass, ...]:  # fmt: skip
    """The kernels that serve a problem on pages of q's dtype, or of 8-bit numbers, the first ones best."""
    k, v = (ShapeDtype(x.shape, q.dtype) if is_quantized else x for x in (k, v))
    problem = problem_of(q, k, v, sink, layout, options)
    if problem is None:
        return ()
    left, right, kernel, part_keys = options.left, options.right, options.kernel, options.part_keys
    if kernel in _OF_DECODE and not decode_reasons(problem, device, is_quantized=is_quantized):
        decode = decode_pass(
            problem, device, layout, left=left, right=right, part_keys=part_keys, is_quantized=is_quantized
        )
        return (decode,)
    has_few_rows = problem.group_size * problem.seqlen_q <= MOST_ROWS
    if is_quantized or part_keys is not None and has_few_rows:
        # Rows of 8 bits are gathered and scaled. Bits would depend on the number of new tokens.
        return ()
    families = PREFILL_FAMILIES if kernel == "auto" else (kernel,)
    served = (family for family in families if not prefill_reasons(problem, device, family))
    return tuple(prefill_pass(problem, device, layout, family, left=left, right=right) for family in served)


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


def _has_layout(given: dict[str, Array]) -> bool:
    """Tell whether kernels can walk arrays, all of which lie on the current device or on the host."""
    if any(layout_reasons(name, array) for name, array in given.items()):
        return False
    for name in ("k", "v"):
        array = given[name]
        if chunk_reasons(name, array.strides, array.dtype.itemsize, address(array)):
            return False
    places = {device_number(array) for array in given.values()}
    return places == {None} or places == {nvrtc.current_device()[1]}
