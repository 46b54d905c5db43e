"""Plans as users call them: they check arrays, allocate results, and pass both to an executor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .arrays import (
    Array, describe, is_array, is_list, is_ragged, namespace, no_array, of_list,
)  # fmt: skip
from .blocks.carried import Owner
from .blocks.work_list import ListedWork
from .compiler import nvrtc
from .errors import UnsupportedProblem, refuse
from .executors._layout_key import layout_key
from .executors._bound_plan import BoundPlan
from .executors import checks, gpu
from .executors.launch import Lists
from .keywords import explains_keywords, require_own_names
from .masks.base import Band, Mask
from .masks.content import held_arrays
from .layouts import (
    COPIES, device_number, dtypes_of_lists, is_broadcast, is_foreign, is_on_cuda, is_tracer, kind_of, layout_reasons,
    overlap, taken,
)  # fmt: skip
from .planning._call_cache import CALLS
from .planning.device import other_device_reasons
from .planning.explain import explain
from .planning.list_kernels import AT_CALL, WorkAtCall
from .planning.options import DOT, Directions
from .planning.plan import KernelPlan
from .planning.problem import Problem
from .planning.tangents import arrays_with_tangents, gathered, tangent_reasons, tangents_among, with_dots


@explains_keywords
@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of one call; unpacks to dq, dk, dv. `gradients[name]` is the gradient of an array named by `wrt`.

    Parameters
    ----------
    dq, dk, dv : array
        Gradients with the shapes and dtype of q, k and v, summed over broadcast axes.
    others : dict of arrays by name
        Gradients of the arrays that `wrt` names, with their shapes and dtypes.

    Examples
    --------
    >>> gradients = Gradients("dq", "dk", "dv", {"sink": "dsink"})
    >>> dq, dk, dv = gradients
    >>> gradients["sink"]
    'dsink'
    """

    dq: Array
    dk: Array
    dv: Array
    others: Mapping[str, Array] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Array]:
        return iter((self.dq, self.dk, self.dv))

    def __getitem__(self, name: str) -> Array:
        if name not in self.others:
            names = ", ".join(map(repr, self.others)) or "nothing"
            raise KeyError(
                f"no gradient of {name!r} was requested: wrt names {names}, and those of q, k and v are the attributes "
                "dq, dk and dv"
            )
        return self.others[name]


_NAMESPACES = {"cpu": "numpy", "gpu": "cupy", "sim": "numpy"}


@dataclass(frozen=True, eq=False)
class Plan:  # numpydoc ignore=PR01
    """A plan that is ready to run, as returned by `cuflash.plan`.

    Attributes
    ----------
    executor : str
        "cpu", "gpu" or "sim".

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 16, 8), np.float32)
    >>> ready = cuflash.plan(q, k, v, causal=True)
    >>> o, lse = ready.forward(q, k, v)
    >>> o.shape, lse.shape
    ((2, 16, 8), (2, 16))
    """

    _plan: KernelPlan  # problem, mask, device, work and kernels
    executor: str = field(default="cpu")
    _captured: Mapping[str, Array] = field(default_factory=dict, repr=False)  # arrays of the score function
    _numbers: tuple[int, ...] = ()  # the seed and the offset of dropout, which each call passes to the kernels
    _owner: Owner = field(default_factory=Owner, init=False, repr=False)
    _lists: ListsOfPlan | None = field(default=None, repr=False)

    def forward(self, q: Array, k: Array, v: Array, out: Any = None, **operands: Array) -> tuple[Array, Array]:
        """Compute o and lse of these arrays.

        Parameters
        ----------
        q, k, v : arrays
            Arrays with the planned shapes and dtype, and any strides.
        out : array, or pair of arrays (o, lse), optional
            Arrays for the results, instead of new ones.
        **operands : arrays
            ``sink=``, if the plan was created with a sink, and arrays that replace arrays of the score function, by
            name. They must have the planned shapes and dtypes, and may have any strides.

        Returns
        -------
        o : array [..., num_heads, seqlen_q, value_dim]
            As returned by `attention`.
        lse : array [..., num_heads, seqlen_q]
            As returned by `attention`.

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            An array does not match the plan. The error lists every reason.
        RuntimeError
            The stream is captured, and the plan is not ready to run; call `compile` before the capture.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> o, lse = ready.forward(q, k, v)
        >>> o.shape, lse.shape
        ((2, 16, 8), (2, 16))
        """
        if operands:
            require_own_names("Plan.forward", operands, (each.name for each in self._plan.problem.operands))
        if self._captured:
            operands = {**self._captured, **operands}
        o, lse = self._run("forward", {"q": q, "k": k, "v": v, **operands}, named_outputs(out))
        return o, lse

    def backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        dlse: Array | None = None,
        **operands: Array,
    ) -> Gradients:
        """Compute the gradients of sum(do * o) + sum(dlse * lse).

        Parameters
        ----------
        do : array
            The gradient of o, with o's shape and dtype, and any strides.
        q, k, v, o, lse : arrays
            Arguments and results of `forward`.
        dlse : array, optional
            The gradient of lse, with lse's shape and dtype; default: zero.
        **operands : arrays
            Arrays that were passed to `forward` by name.

        Returns
        -------
        Gradients
            Unpacks to dq, dk and dv.

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            An array does not match the plan. The error lists every reason.
        RuntimeError
            The stream is captured, and the plan is not ready to run; call `compile` before the capture.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> o, lse = ready.forward(q, k, v)
        >>> dq, dk, dv = ready.backward(np.ones_like(o), q, k, v, o, lse)
        >>> round(float(dv.sum()), 2)              # each of 2 x 16 queries distributes 8 gradients of 1 over its keys
        256.0
        """
        arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        arrays |= self._operands_of("backward", operands)
        return named_gradients(self._plan.problem, self._run("backward", arrays, {}))

    def jvp(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        q_dot: Array | None = None,
        k_dot: Array | None = None,
        v_dot: Array | None = None,
        tangents: Mapping[str, Array] | None = None,
        **operands: Array,
    ) -> tuple[Array, Array]:
        """Compute the tangents of o and lse along tangents of the inputs.

        Parameters
        ----------
        q, k, v, o, lse : arrays
            Arguments and results of `forward`.
        q_dot, k_dot, v_dot, tangents : optional
            As in `attention_jvp`. They may differ from those that `tangents=` named when the plan was created.
        **operands : arrays
            Arrays that were passed to `forward` by name.

        Returns
        -------
        o_dot : array
            The tangent of o, with its shape and dtype.
        lse_dot : array
            The tangent of lse, with its shape and dtype.

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            An array does not match the plan, or the plan's executor has no tangents. The error lists every reason.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True, tangents="v")
        >>> o, lse = ready.forward(q, k, v)
        >>> o_dot, lse_dot = ready.jvp(q, k, v, o, lse, v_dot=2 * v)
        >>> bool(abs(o_dot - 2 * o).max() < 1e-5), bool(lse_dot.any())
        (True, False)
        """
        arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        arrays |= with_dots(gathered(tangents, q=q_dot, k=k_dot, v=v_dot))
        o_dot, lse_dot = self._run("jvp", arrays | self._operands_of("jvp", operands), {})
        return o_dot, lse_dot

    def backward_jvp(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        o_dot: Array,
        lse_dot: Array,
        q_dot: Array | None = None,
        k_dot: Array | None = None,
        v_dot: Array | None = None,
        do_dot: Array | None = None,
        dlse: Array | None = None,
        dlse_dot: Array | None = None,
        tangents: Mapping[str, Array] | None = None,
        **operands: Array,
    ) -> Gradients:
        """Compute the tangents of the gradients that `backward` returns.

        Without `do_dot` and `dlse_dot` these are Hessian-vector products of sum(do * o) + sum(dlse * lse).

        Parameters
        ----------
        do, q, k, v, o, lse : arrays
            As in `backward`.
        o_dot, lse_dot : arrays
            Results of `jvp` for the same tangents.
        q_dot, k_dot, v_dot : array, optional
            As in `jvp`.
        do_dot : array, optional
            Tangent of do.
        dlse : array, optional
            As in `backward`.
        dlse_dot : array, optional
            Tangent of dlse.
        tangents : dict of arrays by name, optional
            As in `jvp`.
        **operands : arrays
            Arrays that were passed to `forward` by name.

        Returns
        -------
        Gradients
            The tangents of dq, dk and dv, and of the gradients of arrays that `wrt` names.

        Raises
        ------
        TypeError, UnsupportedProblem
            For the same reasons as in `jvp`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 8))
        >>> ready = cuflash.plan(q, k, v)
        >>> o, lse = ready.forward(q, k, v)
        >>> o_dot, lse_dot = ready.jvp(q, k, v, o, lse, q_dot=q)
        >>> dots = ready.backward_jvp(np.ones_like(o), q, k, v, o, lse, o_dot, lse_dot, q_dot=q)
        >>> dots.dk.shape
        (2, 16, 8)
        """
        arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, f"o{DOT}": o_dot, f"lse{DOT}": lse_dot}
        if dlse is not None:
            arrays["dlse"] = dlse
        arrays |= with_dots(gathered(tangents, q=q_dot, k=k_dot, v=v_dot, do=do_dot, dlse=dlse_dot))
        results = self._run("backward_jvp", arrays | self._operands_of("backward_jvp", operands), {})
        return named_gradients(self._plan.problem, results)

    def _operands_of(self, name: str, operands: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays that a pass reads, as `_read_by` does; `operands` are keywords of the caller."""
        if operands:
            require_own_names(f"Plan.{name}", operands, (each.name for each in self._plan.problem.operands))
        return self._read_by(name, operands)

    def _read_by(self, name: str, operands: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays that a pass other than "forward" reads, except q, k, v and results, by name."""
        captured, problem = {**self._captured, **operands}, self._plan.problem
        if name == "jvp" or not problem.operands:
            return captured
        return {each: array for each, array in captured.items() if not problem.is_of_forward(each)}

    def _run(self, name: str, arrays: dict[str, Array], outs: Mapping[str, Array]) -> Sequence[Array]:
        """Run a pass on arrays by name; results that are not in `outs` are allocated."""
        if self._lists is not None:
            self._lists.guard.use(gpu.current_target().stream())
        layout = layout_key(*arrays.values(), *outs.values())
        if layout is None:
            arrays, outs = self._as_planned(arrays), outputs_as_arrays(outs)
            layout = layout_key(*arrays.values(), *outs.values())
        key = None if layout is None else (name, id(self._owner), layout, *arrays, *outs)
        bound = None if checks.is_on() else CALLS.get(key)
        if bound is None:
            self._require(name, arrays, outs)
            bound = self._bind(name, arrays, outs)
            if not checks.is_on():
                CALLS.put(key, bound, self._owner)
        elif outs and bound.may_overlap(arrays, outs):
            self._require(name, arrays, outs)
        return bound.run(arrays, outs, self._numbers)

    def _bind(
        self,
        name: str,
        arrays: Mapping[str, Array],
        outs: Mapping[str, Array] = MappingProxyType({}),
        *,
        wants_lse: bool = True,
        pins: bool = False,
        axes: Mapping[str, Sequence[int]] = MappingProxyType({}),
        machine: gpu.Gpu | None = None,
    ) -> BoundPlan:
        """Bind a pass to the layouts of arrays that `_require` has accepted.

        Parameters
        ----------
        name : str
            The pass.
        arrays : dict by name
            The arrays that the pass reads, in the order of later calls. Objects with only a layout suffice on a GPU.
        outs : dict of arrays by name
            Results that the caller allocates.
        wants_lse : bool
            True if lse must be among the results of "forward".
        pins : bool
            If True, memory that a captured call uses is never freed, since the caller does not keep the plan.
        axes, machine : optional
            As in `executors.gpu.bind`.

        Returns
        -------
        BoundPlan
        """
        plan = self._plan if self._lists is None else self._lists.shared
        return BoundPlan(plan, self.executor, name, arrays, outs, wants_lse, pins, axes, machine)

    def _is_launches_alone(self, name: str, outs: Collection[str]) -> bool:
        """True if a pass whose results are written to `outs` does nothing but launch kernels on a GPU."""
        plan = self._plan
        is_plain = self.executor == "gpu" and self._lists is None and plan.is_kernels_alone and not checks.is_on()
        return is_plain and {*outs} == {*plan.results(name)} and plan.results(name) == plan.kernel_results(name)

    def _without_arrays(self) -> Plan:
        """Return the plan without the arrays of its mask and score function, which its bound calls do not read."""
        return replace(self, _plan=replace(self._plan, mask=Band()), _captured={})

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a call needs in addition to its inputs and outputs; see `KernelPlan.workspace_bytes`.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.workspace_bytes > 0
        True
        """
        return self._plan.workspace_bytes

    @explains_keywords
    def explain(self) -> str:
        """Describe the plan's decisions and their reasons, and the registers of kernels that are already compiled.

        Returns
        -------
        str
            One line per decision.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> print(ready.explain())                                          # doctest: +ELLIPSIS
        executor   cpu
        problem    batch (), 2 heads, 16 queries, 16 keys, dims 8 and 8, float32, scale 0.353553
        ...
        """
        notes = dict.fromkeys(self._plan.specs, "simulated") if self.executor == "sim" else {}
        capability = self._plan.device.compute_capability if self.executor == "gpu" else None
        for entry, spec in self._plan.specs.items():
            compiled = nvrtc.compiled(checks.with_watchdog(spec), capability) if capability is not None else None
            if compiled is not None:
                resources = compiled.resources
                notes[entry] = f"{resources.registers} registers, {resources.stack_bytes} bytes of stack"
        lines = [f"executor   {self.executor}"]
        if self._plan.rule:
            lines.append(f"kernels    {self._plan.rule}")
        return "\n".join([*lines, explain(self._plan, notes, self._numbers)])

    @explains_keywords
    def compile(self) -> None:
        """Prepare everything that the first call would otherwise prepare, so that calls can also be captured.

        On a GPU this compiles both passes' kernels, loads them on the current device, copies the work list there, and
        waits for all of this. On other executors it sorts the work list by keys.

        Raises
        ------
        UnsupportedProblem
            The plan is for a different kind of GPU than the current one.
        CompileError, RuntimeError
            A kernel does not compile; or CuPy or the GPU is missing.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.compile()
        """
        if self.executor != "gpu":
            if isinstance(self._plan.work, ListedWork):
                self._plan.work.make_ready()
            return
        self._require_own_device()
        gpu.make_ready(self._plan)

    def _require(
        self, name: str, arrays: Mapping[str, Array], outs: Mapping[str, Array], machine: gpu.Gpu | None = None
    ) -> None:
        """Refuse arrays that do not match a pass of the plan, before anything is allocated or launched.

        Parameters
        ----------
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
            The stream is captured, and the plan is not ready to run; call `compile` before the capture.
        """
        problem = self._plan.problem
        needed = problem.wrt if name.startswith("backward") else [operand.name for operand in problem.operands]
        reasons = list[str]()
        if name.endswith("jvp"):
            cotangents = {each: arrays[each] for each in ("do", "dlse") if each in arrays}
            directions = Directions(f"Plan.{name}", tangents_among(arrays), cotangents)
            reasons = tangent_reasons(directions, problem, self.executor)
            arrays = {each: array for each, array in arrays.items() if each[: -len(DOT)] not in directions.tangents}
        reasons += self._input_reasons(arrays, needed)
        for result, array in outs.items():
            shape, dtype = self._wanted[result]
            reasons += self._output_reasons(_name_of_out(result, outs), array, shape, dtype, arrays)
        if len(outs) == 2 and not reasons and overlap(*outs.values()):
            reasons.append("out[0] and out[1] must not overlap in memory: pass separate arrays")
        refuse(reasons)
        self._require_ready(machine)

    def _require_ready(self, machine: gpu.Gpu | None = None) -> None:
        """Refuse to run if something is missing, before anything is allocated or launched.

        Parameters
        ----------
        machine : optional
            The machine that runs the kernels; default: the one for CuPy arrays.

        Raises
        ------
        UnsupportedProblem
            The plan is for a different kind of GPU than the current one.
        RuntimeError
            The stream is captured, and the plan is not ready to run; call `compile` before the capture.
        """
        if self.executor != "gpu":
            return
        self._require_own_device()
        if not self._plan.is_empty:
            gpu.require_capturable(self._plan, machine)

    def _require_own_device(self) -> None:
        """Refuse to run if the current device does not match the plan's."""
        refuse(other_device_reasons(self._plan.device, gpu.current_device()))

    @property
    def _wanted(self) -> dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]]:
        """Shape and dtype of each array that a pass may take."""
        problem = self._plan.problem
        like_o = problem.o_shape(), problem.dtype
        like_lse = problem.lse_shape(), problem.accumulator
        return {
            **{name: (shape, problem.dtype) for name, shape in problem.argument_shapes().items()},
            **{operand.name: (operand.shape, operand.dtype) for operand in problem.operands},
            **{"o": like_o, "do": like_o, f"o{DOT}": like_o},
            **{"lse": like_lse, "dlse": like_lse, f"lse{DOT}": like_lse},
        }

    def _as_planned(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return other libraries' arrays converted by `as_arrays`, and lists as arrays of the planned dtypes."""
        has_lists = any(map(is_list, arguments.values()))
        dtypes = {name: dtype for name, (_, dtype) in self._wanted.items()} if has_lists else None
        if dtypes is not None:
            dtypes |= {f"{name}{DOT}": dtype for name, (_, dtype) in arrays_with_tangents(self._plan.problem).items()}
        return as_arrays(arguments, dtypes)

    def _input_reasons(self, arrays: Mapping[str, Array], needed: Sequence[str]) -> list[str]:
        """Return why arrays do not match the plan; operands in `needed` must be among them."""
        wanted = self._wanted
        if isinstance(self._plan.work, WorkAtCall):
            wanted[AT_CALL] = (self._plan.work.source.nbytes,), np.dtype(np.uint8)
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
            reasons += self._location_reasons(name, array)
            if tuple(array.shape) != shape or array.dtype != dtype:
                fix = f": cast it with {name}.astype({dtype.name!r})" if tuple(array.shape) == shape else ""
                reasons.append(
                    f"{name} must have shape {shape} and dtype {dtype}; got {tuple(array.shape)} and {array.dtype}{fix}"
                )
        return reasons

    def _location_reasons(self, name: str, array: Array) -> list[str]:
        """Return why the executor cannot access an array."""
        wanted_namespace = _NAMESPACES[self.executor]
        if namespace(array).__name__ != wanted_namespace:
            return [
                f"{name} must be a {wanted_namespace} array for executor={self.executor!r}; "
                f"got {kind_of(array)}: copy it with {COPIES[wanted_namespace]}"
            ]
        reasons = [] if self.executor == "cpu" else layout_reasons(name, array)
        return reasons + (device_reasons(name, array) if self.executor == "gpu" else [])

    def _output_reasons(
        self, name: str, array: Any, shape: tuple[int, ...], dtype: Any, inputs: Mapping[str, Array]
    ) -> list[str]:
        """Return why an array cannot be written to as a result."""
        if array is None:
            return []
        if not is_array(array) or namespace(array).__name__ != _NAMESPACES[self.executor]:
            wanted = "CuPy" if self.executor == "gpu" else "NumPy"
            pair = ", or a pair (o, lse) of arrays" if name == "out" else ""
            return [f"{name} must be a {wanted} array of shape {shape} and dtype {dtype}{pair}; got {describe(array)}"]
        reasons = self._location_reasons(name, array)
        if array.shape != shape or array.dtype != dtype:
            reasons.append(f"{name} must have shape {shape} and dtype {dtype}; got {array.shape} and {array.dtype}")
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            reasons.append(
                f"{name} must be writeable; got a read-only array: pass another array, or release the vjp that reads it"
            )
        if is_broadcast(array):
            reasons.append(
                f"{name} must not be a broadcast view; got strides {array.strides}: pass a separate array"
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


class ListsOfPlan(NamedTuple):
    """Additional parts of a plan for which kernels built the lists on the device when it was created.

    Attributes
    ----------
    shared : KernelPlan
        The plan for all masks of this layout, without lists; its launches are bound.
    guard : Lists
        Makes other streams wait for the lists before they read them, and delays freeing the lists until those
        streams have read them.
    """

    shared: KernelPlan
    guard: Lists


def named_outputs(out: Any) -> dict[str, Any]:
    """Return the arrays of `out=` by result name, without those that are None."""
    pair = out if isinstance(out, (tuple, list)) and len(out) == 2 else (out,)
    return {name: array for name, array in zip(("o", "lse"), pair) if array is not None}


def _name_of_out(result: str, outs: Mapping[str, Any]) -> str:
    """Return the name of an array of `out=` in messages."""
    return "out[1]" if result == "lse" else "out[0]" if "lse" in outs else "out"


def outputs_as_arrays(outs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays that a call writes to, converted by `as_arrays`, by result name."""
    arrays = as_arrays({_name_of_out(result, outs): array for result, array in outs.items()})
    return dict(zip(outs, arrays.values()))


def with_numbers(ready: Plan, numbers: tuple[int, ...]) -> Plan:
    """Return a plan for calls with a different dropout seed, which shares all launches."""
    reseeded = replace(ready, _numbers=numbers)
    object.__setattr__(reseeded, "_owner", ready._owner)
    return reseeded


def as_arrays(values: Mapping[str, Any], dtypes: Mapping[str, Any] | None = None, like: Any = None) -> dict[str, Any]:
    """Return other libraries' arrays as CuPy or NumPy arrays, in place and without a copy; other values unchanged.

    Nested lists of numbers become arrays on the device of the other arrays, or of `like`. A list has no dtype of its
    own: q, k, v, o and do get the dtype of the first of them that is an array; lse and dlse that of its accumulator.

    Parameters
    ----------
    values : dict by name
        Arrays, or other values that a call may receive instead of arrays.
    dtypes : dict of dtypes by name, optional
        Dtypes of lists with these names, in the format of `of_list`.
    like : array, optional
        An array that is not among the values.

    Raises
    ------
    UnsupportedProblem
        A value is not supported; the error lists all reasons.
    RuntimeError
        An array is on a GPU, and CuPy is missing.
    """
    arrays, reasons = dict(values), list[str]()
    lists = [name for name, value in values.items() if is_list(value) or is_ragged(value)]
    known = dtypes_of_lists(values) | dict(dtypes or {}) if lists else {}
    for name, value in values.items():
        try:
            if name in known and name in lists:
                arrays[name] = of_list(name, value, known[name])
            elif is_foreign(value):
                arrays[name] = taken(name, value, gpu.namespace() if is_on_cuda(name, value) else np)
            elif is_array(value) and namespace(value).__name__ not in _NAMESPACES.values():
                fix = "pass its todense()" if hasattr(value, "todense") else "call this outside of traced code"
                if name in ("q", "k", "v") and is_tracer(value):
                    fix += ", or call cuflash.jax.attention"
                reasons.append(f"{name} must support DLPack export; got {kind_of(value)}: {fix}")
        except UnsupportedProblem as error:
            reasons.extend(error.reasons)
    refuse(reasons)
    if lists and any(namespace(value).__name__ == "cupy" for value in (like, *arrays.values())):
        arrays |= {name: gpu.namespace().asarray(arrays[name]) for name in lists if is_array(arrays[name])}
    return arrays


def as_mask_of_arrays(mask: Any, executor: str, like: Any = None) -> Any:
    """Return the value of `mask=`, with other libraries' arrays converted by `as_arrays`; other values unchanged.

    A list becomes an array on the device of `like`.

    Raises
    ------
    UnsupportedProblem
        An array is not supported, or is on a GPU that the executor does not use.
    RuntimeError
        An array is on a GPU, and CuPy is missing.
    """

    def take(array: Any) -> Any:
        if is_foreign(array) and is_on_cuda("mask", array) and executor != "gpu":
            refusal = f"mask's arrays must be on q's device; got {kind_of(array)} on a CUDA device with q on the host"
            raise UnsupportedProblem([f"{refusal}: copy them to the host, or q, k and v to the device"])
        return as_arrays({"mask": array}, like=like)["mask"]

    if not isinstance(mask, Mask):
        return take(mask)
    is_known = all(namespace(array).__name__ in _NAMESPACES.values() for array in held_arrays(mask))
    return mask if is_known else mask.to(take)


def named_gradients(problem: Problem, results: Sequence[Array]) -> Gradients:
    """Return gradients, which are in the order of `KernelPlan.gradients`, by name."""
    dq, dk, dv, *others = results
    return Gradients(dq, dk, dv, dict(zip(problem.wrt, others)))
