"""Calls the kernels that attend from many new tokens to a cache, where they serve the call."""

from __future__ import annotations

from functools import lru_cache

from ..arrays import Array, ShapeDtype
from ..errors import UnsupportedProblem
from ..executors._records import View
from ..planning.decoding import MOST_ROWS, CacheLayout
from ..planning.device import DeviceSpec
from ..planning.launches import Pass
from ..planning.prefill import prefill_pass, prefill_reasons
from ..planning.routing import PREFILL_FAMILIES
from .decoding import DecodeOptions, device_of, has_layout, shapes_of, problem_of

_KERNELS = ("auto", *PREFILL_FAMILIES)  # names of families that may be asked for


def prefill_pass_of(
    arrays: dict[str, Array | None], layout: CacheLayout, options: DecodeOptions
) -> Pass | None:
    """The launches of the first family whose kernels serve a call; None where none does.

    Parameters
    ----------
    arrays : dict by name
        q, k, v, o, lse and sink.
    """
    given = {name: array for name, array in arrays.items() if array is not None}
    device = device_of(options, given, _KERNELS)
    if device is None or "k_scale" in given or not has_layout(given):  # rows of 8 bits are gathered and scaled
        return None
    rows = given["q"].shape[2] * (given["q"].shape[1] // given["k"].shape[1])
    if options.part_keys is not None and rows <= MOST_ROWS:  # bits would depend on the number of new tokens
        return None
    for family in PREFILL_FAMILIES if options.kernel == "auto" else (options.kernel,):
        try:
            kernels = _pass(*shapes_of(given), layout, device, options, family)
        except (UnsupportedProblem, TypeError):  # `attention` says all that is wrong with a call
            return None
        if kernels is not None and _has_maps(kernels, given):
            return kernels
    return None


def _has_maps(kernels: Pass, given: dict[str, Array]) -> bool:
    """Tell whether the hardware copies boxes of keys and values, where the kernels have it do so."""
    boxes = [each for feature in kernels.features for each in feature.boxes.values() if each[0] in ("k", "v")]
    return not any(View.of(name, given[name]).boxes(box).reasons(address=0) for name, box in boxes)


@lru_cache(maxsize=256)
def _pass(
    q: ShapeDtype,
    k: ShapeDtype,
    v: ShapeDtype,
    sink: ShapeDtype | None,
    layout: CacheLayout,
    device: DeviceSpec,
    options: DecodeOptions,
    family: str,
) -> Pass | None:
    """A family's launches for a cache's pages; None where it does not serve the problem."""
    problem = problem_of(q, k, v, sink, layout, options)
    if problem is None or prefill_reasons(problem, device, family):
        return None
    return prefill_pass(problem, device, layout, family, left=options.left, right=options.right)
