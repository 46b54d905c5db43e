"""Plans that take arrays: they check them, allocate results, and hand both to an executor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .arrays import (
    Array, ShapeDtype, describe, is_array, is_list, is_ragged, namespace, no_array, of_list, times_power_of_two,
)  # fmt: skip
from .blocks.carried import Owner
from .blocks.work_list import ListedWork
from .compiler import nvrtc
from .errors import UnsupportedProblem, refuse
from .executors._layout_key import layout_key
from .executors import checks, cpu, gpu, sim, without_keys
from .keywords import explains_keywords, require_own_names
from .masks.base import Mask
from .masks.content import held_arrays
from .layouts import (
    COPIES, device_number, dtypes_of_lists, is_broadcast, is_foreign, is_on_cuda, is_tracer, kind_of, layout_reasons,
    overlap, reach, taken,
)  # fmt: skip
from .planning._call_cache import CALLS
from .planning.device import other_device_reasons
from .planning.explain import explain
from .planning.list_kernels import AT_CALL, WorkAtCall
from .planning.plan import KernelPlan
from .planning.problem import Problem

EXECUTORS: dict[str, Any] = {"cpu": cpu, "gpu": gpu, "sim": sim}


@explains_keywords
@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of one call; unpacks to dq, dk, dv. `gradients[name]` is that of an array that `wrt` names.

    Parameters
    ----------
    dq, dk, dv : array
        Gradients of the shapes and the dtype of q, k and v, summed over the axes that were broadcast.
    others : dict of arrays by name
        Of the shapes and dtypes of the arrays that `wrt` names.

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
            given_arrays = ", ".join(map(repr, self.others)) or "nothing"
            raise KeyError(
                f"no gradient of {name!r} was asked for: wrt names {given_arrays}, and those of q, k and v are the "
                "attributes dq, dk and dv"
            )
        return self.others[name]


BoundCall = Callable[..., Sequence[Array]]
_NAMESPACES = {"cpu": "numpy", "gpu": "cupy", "sim": "numpy"}


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan ready to run: what `cuflash.plan` returns.

    Parameters
    ----------
    plan : KernelPlan
        Problem, mask, device, work and kernels.
    executor : str
        "cpu", "gpu" or "sim".
    captured : dict of arrays by name
        Those of the score function, which calls use that are not given others in their place.
    numbers : tuple of int
        The seed and the offset of dropout, which each call hands to the kernels.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 16, 8), np.float32)
    >>> ready = cuflash.plan(q, k, v, causal=True)
    >>> o, lse = ready.forward(q, k, v)
    >>> o.shape, lse.shape
    ((2, 16, 8), (2, 16))
    """

    plan: KernelPlan
    executor: str = field(default="cpu")
    captured: Mapping[str, Array] = field(default_factory=dict, repr=False)
    numbers: tuple[int, ...] = ()
    _owner: Owner = field(default_factory=Owner, init=False, repr=False)

    def forward(self, q: Array, k: Array, v: Array, out: Any = None, **operands: Array) -> tuple[Array, Array]:
        """Compute o and lse of these arrays.

        Parameters
        ----------
        q, k, v : arrays
            Arrays of the planned shapes and dtype, with any strides.
        out : array, or pair of arrays (o, lse), optional
            Arrays that are written to instead of new ones.
        **operands : arrays
            ``sink=``, if the plan was made with one, and by their names arrays of the score function, in place of those
            that it was planned with. They have the planned shapes and dtypes, and any strides.

        Returns
        -------
        o : array [..., num_heads, seqlen_q, value_dim]
            As `attention` returns it.
        lse : array [..., num_heads, seqlen_q]
            As `attention` returns it.

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            An array is not what was planned. It lists every reason.
        RuntimeError
            The stream is captured and something is not ready: `compile` makes it so.

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
            require_own_names("Plan.forward", operands, (each.name for each in self.plan.problem.operands))
        if self.captured:
            operands = {**self.captured, **operands}
        outs = () if out is None else tuple(out) if isinstance(out, (tuple, list)) and len(out) == 2 else (out,)
        layout = layout_key(q, k, v, *operands.values(), *outs)
        if layout is None and not outs:
            q, k, v, *others = self._taken({"q": q, "k": k, "v": v, **operands}).values()
            operands = dict(zip(operands, others))
            layout = layout_key(q, k, v, *others)
        key = self._call_key("forward", layout, len(outs), *operands)
        bound_call = CALLS.get(key)
        if bound_call is not None and not checks.is_on():
            results = bound_call(q, k, v, *operands.values(), *outs, numbers=self.numbers)
            if results is not None:
                o, lse = results
                return o, lse
        out_o, out_lse, *_ = *outs, None, None
        name_o = "out" if out_lse is None else "out[0]"
        given = self._taken({"q": q, "k": k, "v": v, **operands, name_o: out_o, "out[1]": out_lse})
        out_o, out_lse = given.pop(name_o), given.pop("out[1]")
        self.check_forward(given, name_o, out_o, out_lse)
        check = checks.Check(namespace(given["q"]), given) if checks.is_on() else None
        if key is not None and check is None and self.can_bind and (not outs or self.executor == "gpu"):
            bound: Any = self.bind_into(given, dict(zip(("o", "lse"), outs)), pins=False) if outs else self.bind(given)
            results = self._cached(key, bound)(*given.values(), *outs, numbers=self.numbers)
            if results is not None:  # else an output may overlap another array
                o, lse = results
                return o, lse
        return self._run_checked(given, check, out_o, out_lse)

    def _run_checked(
        self, given: dict[str, Array], check: checks.Check | None, out_o: Any = None, out_lse: Any = None
    ) -> tuple[Array, Array]:
        """Compute o and lse of arrays that have been checked.

        Parameters
        ----------
        given : dict of arrays by name
            The arrays q, k, v and the operands; scales of 8-bit q, k and v are operands.
        check : Check, optional
            Compares what is around the results after the call.
        out_o, out_lse : array, optional
            Arrays that are written to instead of new ones.
        """
        problem, empty = self.plan.problem, _empty(given["q"], check)
        o = empty("o", problem.o_shape(), problem.dtype) if out_o is None else out_o
        lse = empty("lse", problem.lse_shape(), problem.accumulator) if out_lse is None else out_lse
        if self.plan.is_empty:
            without_keys.forward(self.plan, {**given, "o": o, "lse": lse})
        else:
            q, k = ("q", "k") if problem.rows_per_scale is None else ("q_scale", "k_scale")
            given[q], given[k] = self._scaled(given[q], given[k])
            arrays = {**problem.keyed(given), "o": o, "lse": lse}
            EXECUTORS[self.executor].forward(self.plan, arrays, check, self.numbers)
            if self.executor == "gpu":
                gpu.keep_for_capture(
                    self.plan, *(made for made, given in ((o, out_o), (lse, out_lse)) if given is None)
                )
        if check is not None:
            check.after(f"the {self.executor} executor", {"o": o, "lse": lse})
        return o, lse

    @property
    def can_bind(self) -> bool:
        """Return whether calls on arrays that lie alike differ in nothing but addresses.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.can_bind
        True
        """
        return not self.plan.is_empty and self.executor != "sim" and not self._scales_arrays

    @property
    def _scales_arrays(self) -> bool:
        """Return whether q and k are multiplied by powers of two, since the scale is far from 1."""
        return any(self.plan.problem.scaling[1:])

    def _scaled(self, q: Array, k: Array) -> tuple[Array, Array]:
        """q and k, or their gradients, times the powers of two that `Problem.scaling` takes out of the scale."""
        scaling = self.plan.problem.scaling
        return times_power_of_two(q, scaling.q_exponent), times_power_of_two(k, scaling.k_exponent)

    def bind(self, given: Mapping[str, Array], *, pins: bool = False, wants_lse: bool = True) -> BoundCall:
        """Return `forward` without its checks, for arrays of the same layout as these, which it has accepted.

        Parameters
        ----------
        given : dict of arrays by name
            The arrays q, k, v and the operands, of the layout to come.
        pins : bool
            Whether what a capture needs stays for ever, since the caller does not hold the plan.
        wants_lse : bool
            Whether the function must return lse; else it may return o alone.

        Returns
        -------
        callable
            Takes the arrays in that order, and `numbers`, and returns o and lse.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> o, lse = ready.bind({"q": q, "k": k, "v": v})(q, k, v)
        >>> o.shape
        (2, 16, 8)
        """
        plan, problem = self.plan, self.plan.problem
        given = problem.keyed(given)
        o, lse = ShapeDtype(problem.o_shape(), problem.dtype), ShapeDtype(problem.lse_shape(), problem.accumulator)
        if self.executor == "gpu":
            assert plan.kernels is not None
            wanted, unwanted = ({"o": o, "lse": lse}, {}) if wants_lse else ({"o": o}, {"lse": lse})
            return gpu.bind(plan, plan.kernels.forward, given, wanted, unwanted=unwanted, pins=pins)
        names, executor = (*given, "o", "lse"), EXECUTORS[self.executor]

        def bound_call(*arrays: Array, numbers: Sequence[int] = ()) -> tuple[Array, Array]:
            made = np.empty(o.shape, o.dtype), np.empty(lse.shape, lse.dtype)
            executor.forward(plan, dict(zip(names, (*arrays, *made))), numbers=numbers)
            return made

        return bound_call

    def bind_into(
        self, given: Mapping[str, Array], outs: Mapping[str, Array], *, wants_lse: bool = True, pins: bool = True
    ) -> Callable[..., Sequence[Array] | None]:
        """Return `forward` for arrays of one layout that writes to arrays of the caller's, on a GPU.

        Parameters
        ----------
        given : dict of arrays by name
            The arrays q, k, v and the operands, of the layout to come.
        outs : dict of arrays by name
            ``o``, or ``o`` and ``lse``: arrays like those that are written to.
        wants_lse, pins : bool
            As `bind` takes them.

        Returns
        -------
        callable
            Takes the arrays in that order, and `numbers`, and returns o and lse; None, and nothing is done, where an
            array that is written to may overlap another one.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.bind_into({"q": q, "k": k, "v": v}, {"o": q})
        Traceback (most recent call last):
            ...
        ValueError: calls that write to given arrays are bound on a GPU alone
        """
        plan, problem = self.plan, self.plan.problem
        if self.executor != "gpu" or plan.kernels is None:
            raise ValueError("calls that write to given arrays are bound on a GPU alone")
        results = {"lse": ShapeDtype(problem.lse_shape(), problem.accumulator)} if "lse" not in outs else {}
        wanted, unwanted = (results, {}) if wants_lse else ({}, results)
        bound = gpu.bind(
            plan, plan.kernels.forward, {**problem.keyed(given), **outs}, wanted, unwanted=unwanted, pins=pins
        )
        spans, first_out = [reach(array) for array in (*given.values(), *outs.values())], len(given)

        def call(*arrays: Array, numbers: Sequence[int] = ()) -> Sequence[Array] | None:
            starts = [array.data.ptr for array in arrays]
            ends = [start + high for start, (_, high) in zip(starts, spans)]
            starts = [start + low for start, (low, _) in zip(starts, spans)]
            for out in range(first_out, len(arrays)):
                for other in range(out):
                    if starts[out] < ends[other] and starts[other] < ends[out]:
                        return None
            return (*arrays[first_out:], *bound(*arrays, numbers=numbers))

        return call

    def _arrays_of_backward(
        self, arrays: tuple[Array, ...], dlse: Array | None, operands: Mapping[str, Array]
    ) -> tuple[Hashable, tuple[Array, ...], dict[str, Array]]:
        """The arrays of a backward pass as kernels take them, the key of their layouts, and the operands among them.

        Parameters
        ----------
        arrays : tuple of arrays
            do, q, k, v, o and lse.
        dlse : array, optional
        operands : dict of arrays by name
            Those that a call gives in place of captured ones.
        """
        if dlse is not None:
            arrays = *arrays, dlse
        if operands:
            require_own_names("Plan.backward", operands, (each.name for each in self.plan.problem.operands))
        if self.captured:
            operands = {**self.captured, **operands}
        read = {}
        if operands:
            read = {name: array for name, array in operands.items() if not self.plan.problem.is_of_forward(name)}
            arrays = *arrays, *read.values()
        layout = layout_key(*arrays)
        if layout is None:
            arrays = tuple(self._taken(dict(zip(backward_names(dlse is not None, read), arrays))).values())
            layout = layout_key(*arrays)
        return self._call_key("backward", layout, dlse is None, *read), arrays, read

    def bind_backward(self, given: Mapping[str, Array], results: Mapping[str, ShapeDtype]) -> BoundCall:
        """Return `backward` without its checks, on a GPU, for arrays of the same layout as these.

        Parameters
        ----------
        given : dict of arrays by name
            The arrays of the backward pass by the names that kernels have for them, of the layout to come.
        results : dict of ShapeDtype by name
            The gradients.

        Returns
        -------
        callable
            Takes the arrays in that order, and `numbers`, and returns the gradients.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> cuflash.plan(q, k, v).bind_backward({}, {})
        Traceback (most recent call last):
            ...
        ValueError: backward passes are bound on a GPU alone
        """
        if self.executor != "gpu" or self.plan.kernels is None:
            raise ValueError("backward passes are bound on a GPU alone")
        bound, wanted = gpu.bind(self.plan, self.plan.kernels.backward, given, results), self.plan.gradients
        if wanted == results:
            return bound

        def summed(*arrays: Array, numbers: Sequence[int] = ()) -> Sequence[Array]:
            _refuse_captured_sums()
            found = bound(*arrays, numbers=numbers)
            return [_summed_to(gradient, each.shape, each.dtype) for gradient, each in zip(found, wanted.values())]

        return summed

    def _call_key(self, kind: str, layout: Hashable, *more: Hashable) -> Hashable:
        """Return the key of a call of this plan; None if the layout of its arrays is not known."""
        return None if layout is None else (kind, id(self._owner), layout, more)

    def _cached(self, key: Hashable, bound_call: BoundCall) -> BoundCall:
        """Cache a bound call and return it."""
        CALLS.put(key, bound_call, self._owner)
        return bound_call

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
            The gradient of o, of o's shape and dtype, with any strides.
        q, k, v, o, lse : arrays
            What `forward` took and returned.
        dlse : array, optional
            The gradient of lse, of lse's shape and dtype; zero unless given.
        **operands : arrays
            Arrays that `forward` took by name.

        Returns
        -------
        Gradients
            Unpacks to dq, dk and dv.

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            An array is not what was planned. It lists every reason.
        RuntimeError
            The stream is captured and something is not ready: `compile` makes it so.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> o, lse = ready.forward(q, k, v)
        >>> dq, dk, dv = ready.backward(np.ones_like(o), q, k, v, o, lse)
        >>> round(float(dv.sum()), 2)              # each of 2 x 16 queries hands 8 gradients of 1 to its keys
        256.0
        """
        key, arrays, operands = self._arrays_of_backward((do, q, k, v, o, lse), dlse, operands)
        bound_call, problem = CALLS.get(key), self.plan.problem
        if bound_call is not None and not checks.is_on():
            return named_gradients(problem, bound_call(*arrays, numbers=self.numbers))
        given = dict(zip(backward_names(dlse is not None, operands), arrays))
        refuse(self._input_reasons(given, self.plan.problem.wrt))
        self.require_ready()
        given_arrays = problem.keyed(given)
        wanted, made = self.plan.gradients, self.plan.gradients_made
        if self.executor == "gpu" and wanted != made:
            _refuse_captured_sums()
        read = {name: array for name, array in given_arrays.items() if name not in ("o", "lse")}
        check = checks.Check(namespace(given["q"]), read) if checks.is_on() else None
        if key is not None and check is None and self.executor == "gpu" and self.can_bind:
            bound_call = self._cached(key, self.bind_backward(given_arrays, made))
            return named_gradients(problem, bound_call(*arrays, numbers=self.numbers))
        empty = _empty(given["q"], check)
        results = {name: empty(name, result.shape, result.dtype) for name, result in made.items()}
        if self.plan.is_empty:
            without_keys.backward(self.plan, given_arrays | results)
        else:
            given_arrays["q"], given_arrays["k"] = self._scaled(given_arrays["q"], given_arrays["k"])
            EXECUTORS[self.executor].backward(self.plan, given_arrays | results, check, self.numbers)
        if check is not None:
            check.after(f"the {self.executor} executor", results)
        results["dq"], results["dk"] = self._scaled(results["dq"], results["dk"])
        found = [_summed_to(results[name], each.shape, each.dtype) for name, each in wanted.items()]
        return named_gradients(problem, found)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a call takes beside its inputs and outputs; `KernelPlan.workspace_bytes` has the formula.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.workspace_bytes > 0
        True
        """
        return self.plan.workspace_bytes

    @explains_keywords
    def explain(self) -> str:
        """Describe what was decided and why, and, of kernels that this process compiled, the registers that they take.

        Returns
        -------
        str
            A line for each decision.

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
        notes = dict.fromkeys(self.plan.specs, "simulated") if self.executor == "sim" else {}
        capability = self.plan.device.compute_capability if self.executor == "gpu" else None
        for entry, spec in self.plan.specs.items():
            made = nvrtc.compiled(checks.with_watchdog(spec), capability) if capability is not None else None
            if made is not None:
                notes[entry] = f"{made.resources.registers} registers, {made.resources.stack_bytes} bytes of stack"
        lines = [f"executor   {self.executor}"]
        if self.plan.rule:
            lines.append(f"kernels    {self.plan.rule}")
        return "\n".join([*lines, explain(self.plan, notes, self.numbers)])

    @explains_keywords
    def compile(self) -> None:
        """Make everything ready that the first call would otherwise make, so that calls can be captured too.

        On a GPU these are the kernels of both passes, compiled and loaded on the current device, and the work list
        there; the call waits until all is ready. Elsewhere it is the work list in the order of the keys.

        Raises
        ------
        UnsupportedProblem
            The plan is for another GPU than the current one.
        CompileError, RuntimeError
            A kernel does not compile; CuPy or the GPU is missing.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.compile()
        """
        if self.executor != "gpu":
            if isinstance(self.plan.work, ListedWork):
                self.plan.work.make_ready()
            return
        self._require_own_device()
        gpu.make_ready(self.plan)

    def check_forward(
        self, given: dict[str, Array], name_o: str, out_o: Any, out_lse: Any, machine: gpu.Gpu | None = None
    ) -> None:
        """Refuse arrays that `forward` does not take.

        Parameters
        ----------
        given : dict of arrays by name
            The inputs.
        name_o : str
            The name of `out_o` in messages.
        out_o, out_lse : array or None
            Arrays that are written to.
        machine : optional
            The machine that runs the kernels, where it is not the one for CuPy's arrays.

        Raises
        ------
        UnsupportedProblem
            An array is not what was planned. It lists every reason.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.check_forward({"q": q, "k": k, "v": v}, "out", None, None)
        """
        problem = self.plan.problem
        reasons = self._input_reasons(given, [operand.name for operand in problem.operands])
        reasons += self._output_reasons(name_o, out_o, problem.o_shape(), problem.dtype, given)
        reasons += self._output_reasons("out[1]", out_lse, problem.lse_shape(), problem.accumulator, given)
        if out_o is not None and out_lse is not None and not reasons and overlap(out_o, out_lse):
            reasons.append("out[0] and out[1] must not overlap in memory: give each its own")
        refuse(reasons)
        self.require_ready(machine)

    def require_ready(self, machine: gpu.Gpu | None = None) -> None:
        """Refuse to run where something is missing, before anything is allocated or launched.

        Parameters
        ----------
        machine : optional
            The machine that runs the kernels, where it is not the one for CuPy's arrays.

        Raises
        ------
        UnsupportedProblem
            The plan is for another GPU than the current one.
        RuntimeError
            The stream is captured and something is not ready: `compile` makes it so.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> q = k = v = np.ones((2, 16, 8), np.float32)
        >>> ready = cuflash.plan(q, k, v, causal=True)
        >>> ready.require_ready()
        """
        if self.executor != "gpu":
            return
        self._require_own_device()
        if self._scales_arrays:
            gpu.refuse_capture("for a scale so far from 1 q and k are copied to memory that a graph would outlive")
        if not self.plan.is_empty:
            gpu.require_capturable(self.plan, machine)

    def _require_own_device(self) -> None:
        """Refuse a current device that is not like the one of the plan."""
        refuse(other_device_reasons(self.plan.device, gpu.current_device()))

    @property
    def _wanted(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array that a pass may be given."""
        problem = self.plan.problem
        return {
            **{name: (shape, problem.dtype) for name, shape in problem.argument_shapes().items()},
            **{operand.name: (operand.shape, operand.dtype) for operand in problem.operands},
            "o": (problem.o_shape(), problem.dtype),
            "do": (problem.o_shape(), problem.dtype),
            "lse": (problem.lse_shape(), problem.accumulator),
            "dlse": (problem.lse_shape(), problem.accumulator),
        }

    def _taken(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`as_arrays`, with lists in the planned dtypes."""
        has_lists = any(map(is_list, given.values()))
        return as_arrays(given, {name: dtype for name, (_, dtype) in self._wanted.items()} if has_lists else None)

    def _input_reasons(self, given: dict[str, Array], needed: Sequence[str]) -> list[str]:
        """Why arrays are not what was planned; operands that are needed must be among them."""
        wanted = self._wanted
        if isinstance(self.plan.work, WorkAtCall):
            wanted[AT_CALL] = (self.plan.work.source.nbytes,), np.dtype(np.uint8)
        reasons = [
            f"{name} must be given, of shape {wanted[name][0]} and dtype {wanted[name][1]}: the plan was made with it"
            for name in needed
            if name not in given
        ]
        for name, array in given.items():
            if name not in wanted:
                reasons.append(f"{name} must not be given: the plan was made without it")
                continue
            if not is_array(array):
                raise TypeError(no_array(name, array))
            shape, dtype = wanted[name]
            reasons += self._location_reasons(name, array)
            if tuple(array.shape) != shape or array.dtype != dtype:
                fix = f": cast it with {name}.astype({dtype.name!r})" if tuple(array.shape) == shape else ""
                reasons.append(
                    f"{name} must have shape {shape} and dtype {dtype}; got {tuple(array.shape)} and {array.dtype}{fix}"
                )
        return reasons

    def _location_reasons(self, name: str, array: Array) -> list[str]:
        """Why the executor cannot reach an array, or walk it."""
        wanted_namespace = _NAMESPACES[self.executor]
        if namespace(array).__name__ != wanted_namespace:
            return [
                f"{name} must be a {wanted_namespace} array for executor={self.executor!r}; "
                f"got {kind_of(array)}: copy it with {COPIES[wanted_namespace]}"
            ]
        reasons = [] if self.executor == "cpu" else layout_reasons(name, array)
        return reasons + (device_reasons(name, array) if self.executor == "gpu" else [])

    def _output_reasons(
        self, name: str, array: Any, shape: tuple[int, ...], dtype: Any, inputs: dict[str, Array]
    ) -> list[str]:
        """Why an array cannot be written to as a result."""
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
                f"{name} must be writeable; got a read-only array: pass another one, or release the vjp that reads it"
            )
        if is_broadcast(array):
            reasons.append(
                f"{name} must not be a broadcast view; got strides {array.strides}: give an array of its own"
            )
        for other, value in inputs.items():
            if namespace(value) is namespace(array) and overlap(array, value):
                reasons.append(f"{name} must not overlap {other} in memory: give an array of its own")
        return reasons


def device_reasons(name: str, array: Array) -> list[str]:
    """Why an array on a GPU is not on the current one."""
    (_, current), number = nvrtc.current_device(), device_number(array)
    if number == current:
        return []
    return [
        f"{name} must be on the current device, {current}; got device {number}: "
        f"call within cupy.cuda.Device({number}), with all arrays there"
    ]


def backward_names(has_dlse: bool, operands: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a backward pass's arrays in the order in which it takes them."""
    return "do", "q", "k", "v", "o", "lse", *(("dlse",) if has_dlse else ()), *operands


def with_numbers(ready: Plan, numbers: tuple[int, ...]) -> Plan:
    """Return the plan of calls with other numbers, whose launches are the same."""
    made = replace(ready, numbers=numbers)
    object.__setattr__(made, "_owner", ready._owner)
    return made


def as_arrays(given: Mapping[str, Any], dtypes: Mapping[str, Any] | None = None, like: Any = None) -> dict[str, Any]:
    """Arrays of other libraries as CuPy's or NumPy's, where they lie and without a copy; all else as it is.

    Nested lists of numbers become arrays where the other arrays lie, or `like` does. A list has no dtype of its own:
    q, k, v, o and do get that of the first of them which is an array, lse and dlse that of its sums.

    Parameters
    ----------
    given : dict by name
        Arrays, or whatever a call is given in their place.
    dtypes : dict of dtypes by name, optional
        For lists under further names, and under these: as `of_list` takes them.
    like : array, optional
        An array that is not among these.

    Raises
    ------
    UnsupportedProblem
        One cannot be taken; all reasons at once.
    RuntimeError
        One lies on a GPU, and CuPy is missing.
    """
    arrays, reasons = dict(given), list[str]()
    lists = [name for name, value in given.items() if is_list(value) or is_ragged(value)]
    known = dtypes_of_lists(given) | dict(dtypes or {}) if lists else {}
    for name, value in given.items():
        try:
            if name in known and name in lists:
                arrays[name] = of_list(name, value, known[name])
            elif is_foreign(value):
                arrays[name] = taken(name, value, gpu.namespace() if is_on_cuda(name, value) else np)
            elif is_array(value) and namespace(value).__name__ not in _NAMESPACES.values():
                fix = "its todense() makes one" if hasattr(value, "todense") else "call this outside of what is traced"
                if name in ("q", "k", "v") and is_tracer(value):
                    fix += ", or call cuflash.jax.attention"
                reasons.append(f"{name} must be an array that DLPack gives away; got {kind_of(value)}: {fix}")
        except UnsupportedProblem as error:
            reasons.extend(error.reasons)
    refuse(reasons)
    if lists and any(namespace(value).__name__ == "cupy" for value in (like, *arrays.values())):
        arrays |= {name: gpu.namespace().asarray(arrays[name]) for name in lists if is_array(arrays[name])}
    return arrays


def as_mask_of_arrays(mask: Any, executor: str, like: Any = None) -> Any:
    """Return the value of `mask=`, with arrays of other libraries taken as `as_arrays` takes them; all else as it is.

    A list becomes an array where `like` lies.

    Raises
    ------
    UnsupportedProblem
        An array cannot be taken, or lies on a GPU that the executor does not use.
    RuntimeError
        One lies on a GPU, and CuPy is missing.
    """

    def take(array: Any) -> Any:
        if is_foreign(array) and is_on_cuda("mask", array) and executor != "gpu":
            told = f"mask's arrays must be where q is; got {kind_of(array)} on a CUDA device with q on the host"
            raise UnsupportedProblem([f"{told}: copy them to the host, or q, k and v to the device"])
        return as_arrays({"mask": array}, like=like)["mask"]

    if not isinstance(mask, Mask):
        return take(mask)
    is_known = all(namespace(array).__name__ in _NAMESPACES.values() for array in held_arrays(mask))
    return mask if is_known else mask.to(take)


def _empty(like: Array, check: checks.Check | None) -> Callable[..., Array]:
    """Return the function that allocates a result (name, shape, dtype), with margins around it if they are checked."""
    xp = namespace(like)
    return check.empty if check is not None else lambda name, shape, dtype: xp.empty(shape, dtype)


def named_gradients(problem: Problem, made: Sequence[Array]) -> Gradients:
    """Gradients in the order of `KernelPlan.gradients` by their names."""
    dq, dk, dv, *others = made
    return Gradients(dq, dk, dv, dict(zip(problem.wrt, others)))


def _refuse_captured_sums() -> None:
    gpu.refuse_capture("gradients over broadcast axes are summed in memory that a graph would outlive")


def _summed_to(gradient: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Sum over the leading axes that were broadcast, and round once."""
    if gradient.shape == shape:  # a sum over no axes would copy
        return gradient.astype(dtype, copy=False)
    missing = gradient.ndim - len(shape)
    summed_axes = tuple(missing + axis for axis, extent in enumerate(shape) if extent != gradient.shape[missing + axis])
    # Values that float16 cannot hold become inf or 0, and sums of inf NaN, as in the results that need no sum.
    with np.errstate(all="ignore"):
        # Without keepdims NumPy's sum over every axis is a number, which reshape leaves one.
        summed = gradient.sum(axis=(*range(missing), *summed_axes), keepdims=True)
        return summed.reshape(shape).astype(dtype, copy=False)
