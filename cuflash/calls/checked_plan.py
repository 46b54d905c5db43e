"""Plans of calls: all arguments are checked, and all that is wrong with them is said at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..arrays import ShapeDtype, describe, flag_reasons, is_array, namespace
from ..blocks.work_list import requested_mask
from ..compiler import nvrtc
from ..errors import UnsupportedProblem, collecting, refuse
from ..executors import gpu
from ..executors.index_maker import BlockIndex  # plans list the blocks of masks on a device, which its module does
from ..fp8 import Quantized, operands as fp8
from ..fp8.kernel_calls import rows_per_scale
from ..layouts import device_number, is_differentiated
from ..masks.base import Mask
from ..masks.content import held_arrays
from ..planning.device import DeviceSpec
from ..planning.dropout_launches import numbers_of, seed_array
from ..planning.options import Options
from ..planning.plan_cache import plan_for
from ..planning.problem import Problem, precision_reasons, problem_of, with_operands
from ..planning.routing import EIGHT_BITS, FAMILIES, named, routed
from ..planning.scales import RowsPerScale
from ..planning.score_operands import alignment_reasons
from ..plans import EXECUTORS, Plan, as_arrays, as_mask_of_arrays
from ..scores import Score
from ..scores.composition import composition

_SIMULATED = replace(DeviceSpec.gpu("H100"), name="simulator")


def planned(
    q: Any, k: Any, v: Any, options: Options, device: DeviceSpec | None = None, rows: RowsPerScale | None = None
) -> Plan:
    """Return the plan of a call.

    Parameters
    ----------
    q, k, v : arrays
        Arrays, or their shapes and dtypes.
    options : Options
        The arguments of the call.
    device : DeviceSpec, optional
        The device that the plan is for; unless given, the current one.
    rows : RowsPerScale, optional
        The rows of q, k and v that share a scale, where these stand for operands of 8 bits.
    """
    if rows is None:
        require_plain(q, k, v, options.precision)
    q, k, v, sink = as_arrays({"q": q, "k": k, "v": v, "sink": options.sink}).values()
    kernel, precision, mask = options.kernel, options.precision, options.mask
    where = _executor((q, k, v), options.executor, device)
    reasons = _option_reasons((q, k, v), kernel, where, precision, is_elsewhere=device is not None)
    reasons += flag_reasons("deterministic", options.deterministic)
    where = where if isinstance(where, str) else ""
    precision = "ieee" if precision_reasons(q, precision) else precision  # other reasons are found too
    composed = None
    captured = dict[str, Any]()
    with collecting(reasons):
        composed = composed_score(options, q)
        captured = as_arrays(seed_array(options.dropout) | ({} if composed is None else dict(composed.arrays)))
    if type(mask) is BlockIndex and mask.kept is not None:
        mask = mask.kept.mask  # which has lists of earlier calls
    # A plan for elsewhere leaves a mask's arrays where they are.
    converted = partial(as_mask_of_arrays, mask, where, q) if device is None or not isinstance(mask, Mask) else mask
    pose = partial(_posed, namespace(q) if is_array(q) else None, sink, options, composed, precision, converted)
    problem, resolved, found = pose(q, k, v)
    reasons += _with_turn(found, pose, q, k, v) if found else []
    if problem is not None and rows is not None:
        problem = replace(problem, precision=fp8.PRECISION, rows_per_scale=rows)
        if isinstance(kernel, str) and kernel in FAMILIES and kernel != EIGHT_BITS:
            reasons.append(f"kernel must be 'auto' or {EIGHT_BITS!r} for 8-bit q, k and v; got {kernel!r}")
        if precision != "ieee":
            told = f"precision must be 'ieee' or 'fp8' for Quantized q, k and v; got {precision!r}"
            reasons.append(f"{told}: leave it out")
    if device is not None and not isinstance(device, DeviceSpec):
        reasons.append(f"device must be a DeviceSpec or None; got {describe(device)}: DeviceSpec.gpu('H100') is one")
    elif device is not None and (where == "cpu") != (device.compute_capability is None):
        kind = "the host" if where == "cpu" else "a GPU"
        makes = "DeviceSpec.host()" if where == "cpu" else "DeviceSpec.gpu('H100')"
        reasons.append(f"device must be {kind} for executor={where!r}; got {device.name}: {makes} is one")
    if problem is not None:
        if isinstance(kernel, str) and kernel in FAMILIES and where != "cpu":
            reasons += named(kernel, problem).reasons(problem, None)
    if resolved is not None and where == "gpu" and device is None and not reasons:
        reasons += _mask_device_reasons(resolved)
    if reasons or problem is None or resolved is None:
        raise UnsupportedProblem(reasons)
    target = device or _device(where)
    if where != "cpu":
        family = routed(problem, target)[0] if kernel == "auto" else named(kernel, problem)
        refuse(family.reasons(problem, target))
    made = plan_for(problem, resolved, target, kernel if where != "cpu" else None, bool(options.deterministic))
    held = {name: each for name, each in captured.items() if not isinstance(each, ShapeDtype)}
    return Plan(made, where, held, numbers_of(options.dropout))


def _posed(
    where: Any, sink: Any, options: Options, composed: Score | None, precision: Any, mask: Any, q: Any, k: Any, v: Any
) -> tuple[Problem | None, Mask | None, list[str]]:
    """The problem of a call and its mask, resolved, or why there is none; a `partial` makes the mask.

    `where` is the namespace of q, if q is an array.
    """
    reasons, resolved = list[str](), None
    problem = problem_of(reasons, q, k, v, scale=options.scale, precision=precision)
    with collecting(reasons):
        if problem is not None:
            problem = with_operands(problem, {"sink": sink}, options.wrt, composed, options.dropout)
    if problem is not None:
        with collecting(reasons):
            mask = mask() if isinstance(mask, partial) else mask
            resolved = requested_mask(mask, options.causal, options.window, problem.mask_shape, where)
        reasons += alignment_reasons(composed, mask, options.causal, problem.mask_shape)
    return problem, resolved, reasons


def _with_turn(reasons: list[str], pose: Callable[..., Any], *arrays: Any) -> list[str]:
    """Reasons to refuse a call; those that vanish where tokens come before heads say how such arrays are passed.

    They look so if they have as many tokens as heads, or more. `pose` returns the reasons for other q, k and v last.
    """
    shapes = [tuple(array.shape) for array in arrays]
    if any(len(shape) < 3 or shape[-3] < shape[-2] for shape in shapes):
        return reasons
    turned = ((*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes)
    still = set(pose(*(ShapeDtype(shape, array.dtype) for shape, array in zip(turned, arrays)))[-1])
    if not still < set(reasons):
        return reasons
    layout = "(seqlen, heads, dim)" if len(shapes[0]) == 3 else "(batch, seqlen, heads, dim)"
    fix = f"; if your arrays are {layout}, pass x.swapaxes(-3, -2)"
    return [reason if reason in still else reason + fix for reason in reasons]


def composed_score(options: Options, q: Any = None) -> Score | None:
    """score, softcap and bias as one Score, over tensors of PyTorch and arrays of JAX where these are given.

    A bias that is a list becomes an array where q lies.
    """
    return composition(options.score, options.softcap, options.bias, partial(_as_bias, q))


def _as_bias(q: Any, bias: Any) -> Any:
    return bias if is_differentiated(bias) else as_arrays({"bias": bias}, like=q)["bias"]


def require_plain(q: Any, k: Any, v: Any, precision: Any) -> None:
    """Refuse what is neither planned nor differentiated."""
    if fp8.is_asked_for(q, k, v, precision) and (reasons := fp8.gradient_reasons(q, k, v, precision=precision)):
        raise UnsupportedProblem(reasons)


def further_reasons(q: Any, k: Any, v: Any, options: Options) -> list[str]:
    """Return the further reasons to refuse a call whose 8-bit operands are refused: those of its other arguments."""
    reasons: list[str] = []
    with suppress(UnsupportedProblem):  # which is among the reasons already
        q, k, v = as_arrays({"q": q, "k": k, "v": v}).values()
    if all(isinstance(x, Quantized) or is_array(x) for x in (q, k, v)):
        is_elsewhere = options.executor == "gpu" and fp8.are_on_host(q, k, v)  # refused, and there may be no GPU
        options = options._replace(executor="cpu") if is_elsewhere else options
        rows = None if options.executor == "cpu" else rows_per_scale(q, k, v)
        q, k, v = (ShapeDtype(x.shape, np.dtype(np.float32)) for x in (q, k, v))
        with collecting(reasons):
            planned(q, k, v, options, rows=rows)
    return reasons


_host = lru_cache(maxsize=1)(DeviceSpec.host)


def _executor(arrays: tuple[Any, ...], executor: str, device: DeviceSpec | None) -> str:
    """The executor that "auto" stands for: where the arrays are, or what a device given is."""
    if not isinstance(executor, str) or executor != "auto":
        return executor
    if isinstance(device, DeviceSpec):
        return "cpu" if device.compute_capability is None else "gpu"
    return "gpu" if any(namespace(array).__name__ == "cupy" for array in arrays) else "cpu"


def _device(executor: str) -> DeviceSpec:
    if executor == "gpu":
        return gpu.current_device()
    return _host() if executor == "cpu" else _SIMULATED


def _option_reasons(
    arrays: tuple[Any, ...], kernel: str, executor: str, precision: str, *, is_elsewhere: bool
) -> list[str]:
    if not isinstance(executor, str) or executor not in EXECUTORS:
        return [f"executor must be 'auto', {', '.join(map(repr, EXECUTORS))}; got {describe(executor)}"]
    reasons = []
    spaces = {namespace(array).__name__ for array in arrays if is_array(array)}
    if len(spaces) > 1:
        reasons.append(
            f"q, k and v must be of one kind; got arrays of {', '.join(sorted(spaces))}: copy them explicitly"
        )
    elif not is_elsewhere and spaces - {"cupy" if executor == "gpu" else "numpy"}:
        wanted = "CuPy" if executor == "gpu" else "NumPy"
        makes = "cupy.asarray(q)" if executor == "gpu" else "cupy.asnumpy(q)"
        reasons.append(
            f"executor={executor!r} takes {wanted} arrays; got {spaces.pop()}'s as q, k and v: pass {makes}, or leave "
            f"executor= out"
        )
    families = ", ".join(map(repr, FAMILIES))
    if executor == "cpu" and not (isinstance(kernel, str) and kernel == "auto"):
        others = f"{families} are for executor='gpu' and 'sim'"
        reasons.append(f"kernel must be 'auto' on the CPU ({others}); got {describe(kernel)}: leave kernel= out")
    elif not isinstance(kernel, str) or kernel not in ("auto", *FAMILIES):
        reasons.append(f"kernel must be 'auto', {families}; got {describe(kernel)}")
    precision_problems = precision_reasons(arrays[0], precision)
    if executor == "cpu" and not precision_problems and precision != "ieee":
        precision_problems = [
            f"precision={precision!r} needs a GPU's tensor cores; executor='cpu' has precision='ieee'"
        ]
    reasons += precision_problems
    return reasons


def _mask_device_reasons(mask: Mask) -> list[str]:
    """Why kernels on the current device cannot read what a mask holds."""
    _, current = nvrtc.current_device()
    numbers = {device_number(array) for array in held_arrays(mask)} - {None, current}
    return [f"mask's arrays must be on the current device, {current}; got device {number}" for number in numbers]
