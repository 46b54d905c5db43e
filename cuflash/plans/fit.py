"""Checks that arrays match a plan, and that the plan is ready to run on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..arrays import Array, describe, is_array, is_list, namespace, no_array
from ..compiler import nvrtc
from ..errors import refuse
from ..executors import gpu
from ..layouts import COPIES, device_number, kind_of, layout_reasons, overlap, overlaps_itself
from ..planning.device import other_device_reasons
from ..planning.list_kernels import AT_CALL, WorkAtCall
from ..planning.options import DOT, Directions
from ..planning.plan import KernelPlan
from ..planning.problem import ArrayLayout, Problem
from ..planning.tangents import tangent_reasons, tangents_among
from .conversion import NAMESPACES, as_arrays, name_of_out


def require_fit(
    plan: KernelPlan,
    executor: str,
    name: str,
    arrays: Mapping[str, Array],
    outs: Mapping[str, Array],
    machine: gpu.Gpu | None = None,
) -> None:
    """Refuse arrays that do not match a pass of a plan, before anything is allocated or launched.

    Parameters
    ----------
    plan : KernelPlan
    executor : str
        "cpu", "gpu" or "sim".
    name : str
        The pass.
    arrays, outs : dict of arrays by name
        Arrays that the pass reads, and arrays that it writes.
    machine : optional
        The machine that runs the kernels; default: the one for CuPy arrays.

    Raises
    ------
    TypeError
        An argument is not an array.
    UnsupportedProblem
        An array does not match the plan. The error lists every reason.
    RuntimeError
        The stream is captured, and the plan is not ready to run; call `Plan.compile` before the capture.
    """
    problem = plan.problem
    needed = problem.wrt if name.startswith("backward") else [operand.name for operand in problem.operands]
    reasons = list[str]()
    if name.endswith("jvp"):
        cotangents = {each: arrays[each] for each in ("do", "dlse") if each in arrays}
        directions = Directions(f"Plan.{name}", tangents_among(arrays), cotangents)
        reasons = tangent_reasons(directions, problem, executor)
        arrays = {each: array for each, array in arrays.items() if each[: -len(DOT)] not in directions.tangents}
    wanted = problem.array_layouts()
    if isinstance(plan.work, WorkAtCall):
        wanted[AT_CALL] = (plan.work.source.nbytes,), np.dtype(np.uint8)
    reasons += _input_reasons(executor, arrays, wanted, needed)
    for result, array in outs.items():
        reasons += _output_reasons(executor, name_of_out(result, outs), array, wanted[result], arrays)
    if len(outs) == 2 and not reasons and overlap(*outs.values()):
        reasons.append("out[0] and out[1] must not overlap in memory: pass separate arrays")
    refuse(reasons)
    require_ready(plan, executor, machine)


def require_ready(plan: KernelPlan, executor: str, machine: gpu.Gpu | None = None) -> None:
    """Refuse to run a plan if something is missing; parameters and errors are those of `require_fit`."""
    if executor != "gpu":
        return
    require_own_device(plan)
    if not plan.is_empty:
        gpu.require_capturable(plan, machine)


def require_own_device(plan: KernelPlan) -> None:
    """Refuse to run a plan if the current device does not match the plan's."""
    refuse(other_device_reasons(plan.device, gpu.current_device()))


def as_planned(problem: Problem, arguments: Mapping[str, Array]) -> dict[str, Array]:
    """Return other libraries' arrays converted by `as_arrays`, and lists as arrays of the planned dtypes."""
    if not any(map(is_list, arguments.values())):
        return as_arrays(arguments)
    dtypes = {name: dtype for name, (_, dtype) in problem.array_layouts().items()}
    return as_arrays(arguments, dtypes | {f"{name}{DOT}": dtype for name, dtype in dtypes.items()})


def _input_reasons(
    executor: str, arrays: Mapping[str, Array], wanted: Mapping[str, ArrayLayout], needed: Sequence[str]
) -> list[str]:
    """Return why arrays do not match the plan; operands in `needed` must be among them."""
    reasons = [
        f"{name} is required, with shape {wanted[name][0]} and dtype {wanted[name][1]}: it is part of the plan"
        for name in needed
        if name not in arrays
    ]
    for name, array in arrays.items():
        if name not in wanted:
            reasons.append(f"{name} must be left out: the plan was created without it")
            continue
        shape, dtype = wanted[name]
        name = name.replace(DOT, "_dot")
        if not is_array(array):
            raise TypeError(no_array(name, array))
        reasons += _location_reasons(executor, name, array)
        if tuple(array.shape) != shape or array.dtype != dtype:
            fix = f": cast it to {dtype.name}" if tuple(array.shape) == shape else ""
            reasons.append(
                f"{name} must have shape {shape} and dtype {dtype}; got {tuple(array.shape)} and {array.dtype}{fix}"
            )
    return reasons


def _location_reasons(executor: str, name: str, array: Array) -> list[str]:
    """Return why the executor cannot access an array."""
    library = NAMESPACES[executor]
    if namespace(array).__name__ != library:
        rule = f"{name} must be a {library} array for executor={executor!r}"
        return [f"{rule}; got {kind_of(array)}: copy it with {COPIES[library]}"]
    reasons = [] if executor == "cpu" else layout_reasons(name, array)
    return reasons + (device_reasons(name, array) if executor == "gpu" else [])


def _output_reasons(
    executor: str, name: str, array: Array, wanted: ArrayLayout, inputs: Mapping[str, Array]
) -> list[str]:
    """Return why an array cannot be written to as a result."""
    shape, dtype = wanted
    if array is None:
        return []
    if not is_array(array) or namespace(array).__name__ != NAMESPACES[executor]:
        library = "CuPy" if executor == "gpu" else "NumPy"
        pair = ", or a pair (o, lse) of arrays" if name == "out" else ""
        return [f"{name} must be a {library} array of shape {shape} and dtype {dtype}{pair}; got {describe(array)}"]
    reasons = _location_reasons(executor, name, array)
    if array.shape != shape or array.dtype != dtype:
        reasons.append(f"{name} must have shape {shape} and dtype {dtype}; got {array.shape} and {array.dtype}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        reasons.append(
            f"{name} must be writeable; got a read-only array: pass another array, or release the vjp that reads it"
        )
    if overlaps_itself(array):
        reasons.append(
            f"{name} must not overlap itself in memory, as broadcast views do; got strides {array.strides}: pass a "
            "separate array"
        )
    for other, value in inputs.items():
        if namespace(value) is namespace(array) and overlap(array, value):
            reasons.append(f"{name} must not overlap {other} in memory: pass a separate array")
    return reasons


def device_reasons(name: str, array: Array) -> list[str]:
    """Return why an array on a GPU is not on the current one."""
    (_, current), number = nvrtc.current_device(), device_number(array)
    if number == current:
        return []
    return [
        f"{name} must be on the current device, {current}; got device {number}: "
        f"call within cupy.cuda.Device({number}), with all arrays there"
    ]
