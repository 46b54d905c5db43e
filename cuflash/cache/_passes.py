"""The choice of the kernels that serve a call on a cache: for a few new tokens, for many, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays import Array, ShapeDtype, as_number, is_array, is_number
from ..compiler import nvrtc
from ..errors import UnsupportedProblem
from ..executors import gpu
from ..executors._records import View
from ..executors.launch import run_alone
from ..executors.sim import Simulator
from ..layouts import address, device_number, layout_reasons
from ..planning.chosen_pages import ChosenForm, chosen_pass, chosen_reasons
from ..planning.decoding import MOST_ROWS, CacheLayout, chunk_reasons, decode_pass, decode_reasons
from ..planning.device import DeviceSpec
from ..planning.families.sm80 import DECODING
from ..planning.launches import Pass
from ..planning.prefill import prefill_pass, prefill_reasons
from ..planning.problem import Problem, with_operands
from ..planning.routing import PREFILL_FAMILIES
from .scoring import ScoreKind, arrays_of
from ._state import CacheState
from .steps import AttendStep, Request, lists_of

# Permitted values of `kernel=`, and those that allow the decode kernel.
_KERNELS, _OF_DECODE = ("auto", *PREFILL_FAMILIES), ("auto", DECODING.family)
_SIMULATED = DeviceSpec.gpu("H100")


class DecodeOptions(NamedTuple):
    """The arguments of `KVCache.attention` that decide which kernels support a call.

    Attributes
    ----------
    left, right : int, optional
        Numbers of keys before and after a query's own position that it attends; None is unlimited.
    scale, kernel, executor, precision
        As in `cuflash.attention`.
    part_keys : int, optional
        Number of keys in each part into which keys are split, independent of the sequence's length.
    score : ScoreKind, optional
        The score function without its arrays.
    chosen : ChosenForm, optional
        The lists of chosen blocks without their contents.
    """

    left: int | None
    right: int | None
    scale: float | None
    kernel: str
    executor: str
    precision: str
    part_keys: int | None = None
    score: ScoreKind | None = None
    chosen: ChosenForm | None = None


class SimulatedStep(AttendStep):
    """The decode kernel, or the kernels for many new tokens, on the simulator.

    Parameters
    ----------
    kernels : Pass
    arrays, inputs
        As for `AttendStep`.
    """

    def __init__(self, kernels: Pass, arrays: Mapping[str, Array], inputs: Sequence[str]) -> None:
        super().__init__(arrays, inputs)
        self._kernels = kernels

    def attend(
        self, cache: CacheState, request: Request, o: Array, lse: Array | None, counts: Sequence[int] | None
    ) -> None:
        """Compute o and lse; the first counts[b] rows of q belong to sequence b, or all rows if `counts` is None."""
        arrays = {
            "q": request.q, "k": cache.rows.k, "v": cache.rows.v, "sink": request.sink,
            "o": o, "lse": self.make_lse() if lse is None else lse,
            "table": cache.block_table() if cache.is_paged else None, "lengths": cache.length_array(),
            "counts": None if counts is None else np.array(counts, np.int32), "num_faults": np.zeros(1, np.int32),
        }  # fmt: skip
        captured = {} if request.score is None else arrays_of(request.score)
        run_alone(self._kernels, arrays | cache.rows.scales | captured | lists_of(request.chosen), Simulator())


def pass_of(arrays: dict[str, Array | None], layout: CacheLayout, options: DecodeOptions) -> Pass | None:
    """Return the decode kernel, or the first family of prefill kernels that supports a call; None if none does.

    Parameters
    ----------
    arrays : dict by name
        q, k, v, o, lse and sink, the scales of FP8 rows, and the arrays of the score function.
    """
    present = {name: array for name, array in arrays.items() if array is not None}
    device = _device_of(options, present)
    if device is None or not _has_layout(present):
        return None
    shapes = {name: ShapeDtype(array.shape, array.dtype) for name, array in present.items()}
    q, k, v = (shapes[name] for name in "qkv")
    try:
        passes = _passes(q, k, v, shapes.get("sink"), layout, device, options, "k_scale" in present)
    except (UnsupportedProblem, TypeError):  # `attention` then raises all reasons
        return None
    return next((kernels for kernels in passes if _has_maps(kernels, present)), None)


def _has_maps(kernels: Pass, present: dict[str, Array]) -> bool:
    """True if the hardware can copy boxes of keys and values, for kernels that use such copies."""
    boxes = [each for feature in kernels.features for each in feature.boxes.values() if each[0] in ("k", "v")]
    return not any(View.of(name, present[name]).boxes(box).reasons(address=0) for name, box in boxes)


def _device_of(options: DecodeOptions, arrays: dict[str, Array]) -> DeviceSpec | None:
    """Return the device whose kernels would run on these arrays, or None."""
    names = options.executor, options.kernel, options.precision
    if not all(isinstance(name, str) for name in names) or options.kernel not in _KERNELS:
        return None
    is_valid = options.scale is None or is_number(as_number(options.scale))  # equal values, such as True, are refused
    if not is_valid or not all(map(is_array, arrays.values())):
        return None
    of_arrays = ("cpu", "sim") if isinstance(arrays["q"], np.ndarray) else ("gpu",)
    executor = of_arrays[0] if options.executor == "auto" else options.executor
    if executor not in of_arrays or executor == "cpu":
        return None
    return gpu.current_device() if executor == "gpu" else _SIMULATED


@lru_cache(maxsize=256)
def _passes(
    q: ShapeDtype, k: ShapeDtype, v: ShapeDtype, sink: ShapeDtype | None, layout: CacheLayout, device: DeviceSpec,
    options: DecodeOptions, is_quantized: bool,
) -> tuple[Pass, ...]:  # fmt: skip
    """Return the kernels that support a problem on pages of q's dtype, or of FP8 rows, best first."""
    k, v = (ShapeDtype(x.shape, q.dtype) if is_quantized else x for x in (k, v))
    problem = problem_of(q, k, v, sink, layout, options)
    if problem is None:
        return ()
    left, right, kernel, part_keys = options.left, options.right, options.kernel, options.part_keys
    if options.chosen is not None:
        lists = options.chosen
        if kernel not in _OF_DECODE or chosen_reasons(
            problem, device, layout, lists, part_keys, is_quantized=is_quantized
        ):
            return ()
        return (
            chosen_pass(
                problem, device, layout, lists, left=left, right=right, part_keys=part_keys, is_quantized=is_quantized
            ),
        )
    if kernel in _OF_DECODE and not decode_reasons(problem, device, is_quantized=is_quantized):
        decode = decode_pass(
            problem, device, layout, left=left, right=right, part_keys=part_keys, is_quantized=is_quantized
        )
        return (decode,)
    has_few_rows = problem.group_size * problem.seqlen_q <= MOST_ROWS
    if is_quantized or part_keys is not None and has_few_rows:
        # FP8 rows must be gathered and scaled first. With part_keys, bits would depend on the number of new tokens.
        return ()
    families = PREFILL_FAMILIES if kernel == "auto" else (kernel,)
    served = (family for family in families if not prefill_reasons(problem, device, family))
    return tuple(prefill_pass(problem, device, layout, family, left=left, right=right) for family in served)


def problem_of(
    q: ShapeDtype, k: ShapeDtype, v: ShapeDtype, sink: ShapeDtype | None, layout: CacheLayout, options: DecodeOptions
) -> Problem | None:
    """Return a problem whose number of keys is the cache's capacity; None if the sink is not one number per head.

    Raises
    ------
    UnsupportedProblem
        The arguments do not form a valid problem, or the arrays of its score function do not fit.
    """
    if sink is not None and sink.ndim != 1:
        return None
    longest = (ShapeDtype((q.shape[0], x.shape[1], layout.capacity, x.shape[3]), x.dtype) for x in (k, v))
    problem = with_operands(Problem.of(q, *longest, scale=options.scale, precision=options.precision), {"sink": sink})
    return problem if options.score is None else options.score.of(problem)


def _has_layout(arrays: dict[str, Array]) -> bool:
    """True if kernels can access the arrays, which are all on the current device or all on the host."""
    if any(layout_reasons(name, array) for name, array in arrays.items()):
        return False
    for name in ("k", "v"):
        array = arrays[name]
        if chunk_reasons(name, array.strides, array.dtype.itemsize, address(array)):
            return False
    places = {device_number(array) for array in arrays.values()}
    return places == {None} or places == {nvrtc.current_device()[1]}
