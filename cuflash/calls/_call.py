"""Entry point of every call: its arguments are checked once, and all reasons to refuse it are raised together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import TypeAlias

from ..arrays import Array, Namespace, ShapeDtype, describe, flag_reasons, is_array, namespace
from ..blocks.work_list import requested_mask
from ..compiler import nvrtc
from ..errors import collecting, refuse
from ..executors import checks, gpu
from ..executors._bound_plan import EXECUTORS
from ..executors.index_maker import BlockIndex  # this import also lets plans list the blocks of masks on a device
from ..fp8 import operands as fp8
from ..layouts import device_number, is_differentiated
from ..masks._chosen import chosen_masks
from ..masks.base import Mask
from ..masks.content import held_arrays
from ..masks.places import Places, placed
from ..planning.device import DeviceSpec
from ..planning.dropout_launches import numbers_of, seed_array
from ..planning.options import MaskLike, Options
from ..planning.plan_cache import plan_for
from ..planning.problem import FP8, Problem, precision_reasons, problem_of, with_operands
from ..planning.routing import EIGHT_BITS, FAMILIES, named, routed
from ..planning.scales import RowsPerScale
from ..planning.score_operands import alignment_reasons
from ..planning.tangents import names_of_tangents, tangent_reasons
from ..plans.conversion import as_arrays, as_mask_of_arrays
from ..plans.plan import Plan
from ..scores import Score
from ..scores.composition import composition
from ._call_text import call_digest, call_text, parsed_call

_SIMULATED = replace(DeviceSpec.gpu("H100"), name="simulator")
_host = lru_cache(maxsize=1)(DeviceSpec.host)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The checked arguments of a call, without its arrays, the seed of its dropout and its device.

    Attributes
    ----------
    problem : Problem
    mask : Mask
        The intersection of all masks of the call, resolved for the problem's shape.
    executor : str
        "cpu", "gpu" or "sim".
    kernel : str
        "auto", or a kernel family.
    is_deterministic : bool
        True if every gradient must be bitwise reproducible.
    """

    problem: Problem
    mask: Mask
    executor: str
    kernel: str = "auto"
    is_deterministic: bool = False

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        v: Array,
        options: Options,
        device: DeviceSpec | None = None,
        rows: RowsPerScale | None = None,
        reasons: Iterable[str] = (),
    ) -> Call:
        """Check the arguments of a call.

        Parameters
        ----------
        q, k, v : arrays
            Arrays, or their shapes and dtypes.
        options : Options
            The other arguments.
        device : DeviceSpec, optional
            The device for which the call is planned; default: the current one.
        rows : RowsPerScale, optional
            How many rows of q, k and v share a scale, if these are FP8 operands.
        reasons : iterable of str
            The caller's own reasons to refuse the call.

        Raises
        ------
        TypeError
            An argument has the wrong type.
        UnsupportedProblem
            Arguments break their rules. The message lists all reasons.
        """
        arguments = _Arguments.of(q, k, v, options, device, rows)
        refuse([*reasons, *(reason for rule in _RULES for reason in rule(arguments))])
        problem, mask = arguments.problem, arguments.mask
        assert problem is not None and mask is not None
        if options.tangents != ():
            problem = replace(problem, tangents=names_of_tangents(options.tangents, problem))
        kernel = "auto" if arguments.executor == "cpu" else options.kernel
        return cls(
            problem=problem, mask=mask, executor=arguments.executor, kernel=kernel,
            is_deterministic=bool(options.deterministic),
        )  # fmt: skip

    @property
    def text(self) -> str:
        """A text that `parse` converts to an equal call.

        Raises
        ------
        TypeError
            The mask holds arrays or functions.
        """
        return call_text(self)

    @property
    def digest(self) -> str:
        """The first 32 hexadecimal digits of the text's SHA-256 hash."""
        return call_digest(self.text)

    @classmethod
    def parse(cls, text: str) -> Call:
        """Return the call that a text describes."""
        call: Call = parsed_call(text, cls)
        return call

    def plan(self, device: DeviceSpec | None = None) -> Plan:
        """Return the plan of the call for a device; default: the current device of its executor.

        Raises
        ------
        UnsupportedProblem
            No kernel supports the call on the device. The message lists all reasons.
        """
        device = device or _device(self.executor)
        if self.executor == "cpu":
            return Plan(plan_for(self.problem, self.mask, device, None, self.is_deterministic), "cpu")
        family = routed(self.problem, device)[0] if self.kernel == "auto" else named(self.kernel, self.problem)
        refuse(family.reasons(self.problem, device))
        return Plan(plan_for(self.problem, self.mask, device, self.kernel, self.is_deterministic), self.executor)


def _device(executor: str) -> DeviceSpec:
    """Return the current device of an executor."""
    if executor == "gpu":
        return gpu.current_device()
    return _host() if executor == "cpu" else _SIMULATED


def planned(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    device: DeviceSpec | None = None,
    rows: RowsPerScale | None = None,
    reasons: Iterable[str] = (),
) -> Plan:
    """Return the plan of a call with the arrays of its score function; the arguments are those of `Call.of`."""
    plan = Call.of(q, k, v, options, device, rows, reasons).plan(device)
    captured = {name: each for name, each in _captured(options, q).items() if not isinstance(each, ShapeDtype)}
    numbers = () if options.dropout is None else numbers_of(options.dropout)
    return replace(plan, _captured=captured, _numbers=numbers)


def composed_score(options: Options, q: Array = None) -> Score | None:
    """Return score, softcap and bias as one Score, over PyTorch tensors or JAX arrays if these are passed.

    A bias in a list becomes an array on the device of q.
    """
    if options.score is None and options.softcap is None and options.bias is None:
        return None
    return composition(options.score, options.softcap, options.bias, partial(_as_bias, q))


def _as_bias(q: Array, bias: Array) -> Array:
    return bias if is_differentiated(bias) else as_arrays({"bias": bias}, like=q)["bias"]


def _captured(options: Options, q: Array) -> dict[str, Array]:
    """Return the arrays of the score function, and the seed of dropout if it is an array, by name."""
    composed = composed_score(options, q)
    arrays = {} if options.dropout is None else seed_array(options.dropout)
    if composed is not None:
        arrays |= composed.arrays
    return as_arrays(arrays) if arrays else {}


@dataclass(frozen=True, eq=False)
class _Arguments:
    """The arguments of a call, in the form in which the rules check them, and the resulting problem and mask.

    Attributes
    ----------
    arrays : dict by name
        q, k and v.
    options : Options
    executor : str
        The selected executor instead of "auto"; empty if the argument is not a string.
    device : DeviceSpec, optional
    rows : RowsPerScale, optional
    problem : Problem, optional
        None if the arguments do not define a problem.
    mask : Mask, optional
        The resolved mask; None if the arguments do not define one.
    reasons : list of str
        Why the problem or the mask is missing.
    """

    arrays: Mapping[str, Array]
    options: Options
    executor: str
    device: DeviceSpec | None
    rows: RowsPerScale | None
    problem: Problem | None
    mask: Mask | None
    reasons: list[str]

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, options: Options, device: DeviceSpec | None, rows: RowsPerScale | None
    ) -> _Arguments:
        if rows is None:
            refuse(fp8.gradient_reasons(q, k, v))
        q, k, v, sink = as_arrays({"q": q, "k": k, "v": v, "sink": options.sink}).values()
        executor = _executor((q, k, v), options.executor, device)
        executor = executor if isinstance(executor, str) else ""
        reasons: list[str] = []
        composed = None
        with collecting(reasons):
            composed = composed_score(options, q)
            _captured(options, q)
        mask = options.mask
        if type(mask) is BlockIndex and mask._kept is not None:
            mask = mask._kept.mask  # this mask caches the work lists of earlier calls
        # A plan for an explicit device leaves the mask's arrays where they are.
        is_kept = device is not None and isinstance(mask, Mask)
        converted = mask if is_kept else partial(as_mask_of_arrays, mask, executor, q)
        precision = "ieee" if precision_reasons(q, options.precision) else options.precision  # a rule reports errors
        pose = partial(_posed, namespace(q) if is_array(q) else None, sink, options, composed, precision, converted)
        problem, resolved, further = pose(q, k, v)
        reasons += _with_turn(further, pose, q, k, v) if further else []
        if problem is not None and rows is not None:
            problem = replace(problem, precision=FP8, rows_per_scale=rows)
        return cls({"q": q, "k": k, "v": v}, options, executor, device, rows, problem, resolved, reasons)


def _executor(arrays: Iterable[Array], executor: str, device: DeviceSpec | None) -> str:
    """Return the executor for "auto": that of the explicit device, otherwise that of the arrays."""
    if not isinstance(executor, str) or executor != "auto":
        return executor
    if isinstance(device, DeviceSpec):
        return "cpu" if device.compute_capability is None else "gpu"
    return "gpu" if any(namespace(array).__name__ == "cupy" for array in arrays) else "cpu"


_Pose: TypeAlias = Callable[[Array, Array, Array], tuple[Problem | None, Mask | None, list[str]]]


def _posed(
    where: Namespace, sink: Array, options: Options, composed: Score | None, precision: str,
    mask: MaskLike | None | partial[MaskLike | None], q: Array, k: Array, v: Array,
) -> tuple[Problem | None, Mask | None, list[str]]:  # fmt: skip
    """Return the problem of a call, its resolved mask, and the reasons to refuse it.

    `where` is the namespace of q, or None if q is not an array. `mask` may be a `partial` that creates the mask.
    """
    reasons, resolved = list[str](), None
    problem = problem_of(reasons, q, k, v, scale=options.scale, precision=precision)
    place_reasons = list[str]()
    starts = options.q_start, options.kv_start
    if problem is not None and (options.places or {*map(type, starts)} != {int} or any(starts)):
        places = options.places or Places(options.q_start, options.kv_start)
        place_reasons = places.reasons(problem.mask_shape)
        problem = problem if place_reasons else replace(problem, places=places)
    reasons += place_reasons
    with collecting(reasons):
        if problem is not None:
            problem = with_operands(problem, {"sink": sink}, options.wrt, composed, options.dropout)
    if problem is not None and not place_reasons:
        whole = problem.mask_shape if problem.places is None else problem.whole_shape
        with collecting(reasons):
            mask = mask() if isinstance(mask, partial) else mask
            for chosen in chosen_masks(mask):
                chosen.require_heads(whole.num_heads, whole.num_heads // max(1, problem.group_size))
                if checks.is_on():
                    chosen.require_numbers(whole.seqlen_kv)
            resolved = requested_mask(mask, options.causal, options.window, whole, where)
            resolved = resolved if problem.places is None else placed(resolved, problem.places)
        if composed is not None:
            reasons += alignment_reasons(composed, mask, options.causal, whole)
    return problem, resolved, reasons


def _with_turn(reasons: list[str], pose: _Pose, *arrays: Array) -> list[str]:
    """Add a hint to the reasons that would vanish if the arrays had their heads after their tokens.

    The hint requires that axis -3 is at least as long as axis -2. The last result of `pose(q, k, v)` is its reasons.
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


def _executor_reasons(call: _Arguments) -> list[str]:
    """Return why the executor is unknown, or why it does not serve the arrays, the kernel or the precision."""
    executor = call.options.executor
    if call.executor in EXECUTORS:
        return [*_kind_reasons(call), *_kernel_reasons(call), *_precision_reasons(call)]
    return [f"executor must be 'auto', {', '.join(map(repr, EXECUTORS))}; got {describe(executor)}"]


def _kind_reasons(call: _Arguments) -> list[str]:
    kinds = {namespace(array).__name__ for array in call.arrays.values() if is_array(array)}
    if len(kinds) > 1:
        return [f"q, k and v must be of one kind; got arrays of {', '.join(sorted(kinds))}: copy them explicitly"]
    if call.device is not None or not kinds - {"cupy" if call.executor == "gpu" else "numpy"}:
        return []
    wanted, fix = ("CuPy", "cupy.asarray(q)") if call.executor == "gpu" else ("NumPy", "cupy.asnumpy(q)")
    came = f"got {kinds.pop()} arrays as q, k and v"
    return [f"executor={call.executor!r} takes {wanted} arrays; {came}: pass {fix}, or leave executor= out"]


def _kernel_reasons(call: _Arguments) -> list[str]:
    kernel, families = call.options.kernel, ", ".join(map(repr, FAMILIES))
    is_name = isinstance(kernel, str)
    if call.executor == "cpu" and not (is_name and kernel == "auto"):
        others = f"{families} are for executor='gpu' and 'sim'"
        return [f"kernel must be 'auto' on the CPU ({others}); got {describe(kernel)}: leave kernel= out"]
    if not is_name or kernel not in ("auto", *FAMILIES):
        return [f"kernel must be 'auto', {families}; got {describe(kernel)}"]
    if call.rows is not None and kernel not in ("auto", EIGHT_BITS):
        return [f"kernel must be 'auto' or {EIGHT_BITS!r} for FP8 q, k and v; got {kernel!r}"]
    return []


def _precision_reasons(call: _Arguments) -> list[str]:
    precision = call.options.precision
    reasons = precision_reasons(call.arrays["q"], precision)
    if reasons or precision == "ieee":
        return reasons
    if call.rows is not None:
        return [f"precision must be 'ieee' for Quantized q, k and v; got {precision!r}: leave it out"]
    if call.executor == "cpu":
        return [f"precision={precision!r} needs a GPU's tensor cores; executor='cpu' has precision='ieee'"]
    return []


def _deterministic_reasons(call: _Arguments) -> list[str]:
    return flag_reasons("deterministic", call.options.deterministic)


def _device_reasons(call: _Arguments) -> list[str]:
    device, executor = call.device, call.executor
    if device is None:
        return []
    if not isinstance(device, DeviceSpec):
        return [f"device must be a DeviceSpec or None; got {describe(device)}: write DeviceSpec.gpu('H100')"]
    if (executor == "cpu") == (device.compute_capability is None):
        return []
    kind, fix = ("the host", "DeviceSpec.host()") if executor == "cpu" else ("a GPU", "DeviceSpec.gpu('H100')")
    return [f"device must be {kind} for executor={executor!r}; got {device.name}: write {fix}"]


def _family_reasons(call: _Arguments) -> list[str]:
    kernel = call.options.kernel
    if call.problem is None or call.executor == "cpu" or not isinstance(kernel, str):
        return []
    is_named = kernel in FAMILIES or call.rows is not None  # a single family supports FP8
    return named(kernel, call.problem).reasons(call.problem, None) if is_named else []


def _tangent_reasons(call: _Arguments) -> list[str]:
    tangents = call.options.tangents
    return [] if type(tangents) is tuple and not tangents else tangent_reasons(tangents, call.problem, call.executor)


def _mask_device_reasons(call: _Arguments) -> list[str]:
    """Return why kernels on the current device cannot read the mask's arrays."""
    if call.mask is None or call.executor != "gpu" or call.device is not None:
        return []
    numbers = {device_number(array) for array in held_arrays(call.mask)} - {None}
    if not numbers:
        return []
    _, current = nvrtc.current_device()
    return [f"mask's arrays must be on the current device, {current}; got device {n}" for n in numbers - {current}]


_RULES: tuple[Callable[[_Arguments], list[str]], ...] = (
    _executor_reasons, _deterministic_reasons, attrgetter("reasons"), _device_reasons, _family_reasons,
    _mask_device_reasons, _tangent_reasons,
)  # fmt: skip
