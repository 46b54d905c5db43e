"""The plan that users call, which passes arrays to an executor, and its results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ..arrays import Array
from ..blocks.carried import Owner
from ..blocks.work_list import ListedWork
from ..compiler import nvrtc
from ..executors import checks, gpu
from ..executors._bound_plan import BoundPlan
from ..executors._layout_key import layout_key
from ..executors.launch import Lists
from ..keywords import explains_keywords, require_own_names
from ..masks.base import Band
from ..planning._call_cache import CALLS
from ..planning.explain import explain
from ..planning.options import DOT
from ..planning.plan import KernelPlan
from ..planning.problem import Problem
from ..planning.tangents import gathered, with_dots
from .conversion import named_outputs, outputs_as_arrays
from .fit import as_planned, require_fit, require_own_device


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
        if not isinstance(name, str) or name not in self.others:
            names = ", ".join(map(repr, self.others)) or "nothing"
            raise KeyError(
                f"no gradient of {name!r} was requested: wrt names {names}, and those of q, k and v are the attributes "
                "dq, dk and dv"
            )
        return self.others[name]


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
        self._require_own_names("forward", operands)
        arrays = self._with_operands("forward", {"q": q, "k": k, "v": v}, operands)
        o, lse = self._run("forward", arrays, named_outputs(out))
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
        self._require_own_names("backward", operands)
        arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        results = self._run("backward", self._with_operands("backward", arrays, operands), {})
        return named_gradients(self._plan.problem, results)

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
        self._require_own_names("jvp", operands)
        o_dot, lse_dot = self._run("jvp", self._with_operands("jvp", arrays, operands), {})
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
        self._require_own_names("backward_jvp", operands)
        results = self._run("backward_jvp", self._with_operands("backward_jvp", arrays, operands), {})
        return named_gradients(self._plan.problem, results)

    def _require_own_names(self, name: str, operands: Mapping[str, Array]) -> None:
        """Refuse keywords of a method that are not operands of the plan."""
        if operands:
            require_own_names(f"Plan.{name}", operands, (each.name for each in self._plan.problem.operands))

    def _with_operands(
        self, name: str, arrays: dict[str, Array], operands: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Add to the arrays of a pass the other arrays that it reads: `operands`, otherwise the plan's own."""
        if self._captured or operands:
            reads_all = name in ("forward", "jvp")
            for each, array in {**self._captured, **operands}.items():
                if reads_all or not self._plan.problem.is_of_forward(each):
                    arrays[each] = array
        return arrays

    def _run(self, name: str, arrays: dict[str, Array], outs: Mapping[str, Array]) -> Sequence[Array]:
        """Run a pass on arrays by name; results that are not in `outs` are allocated."""
        if self._lists is not None:
            self._lists.guard.use(gpu.current_target().stream())
        layout = layout_key(*arrays.values(), *outs.values())
        if layout is None:
            arrays, outs = as_planned(self._plan.problem, arrays), outputs_as_arrays(outs)
            layout = layout_key(*arrays.values(), *outs.values())
        key = None if layout is None else (name, id(self._owner), layout, *arrays, *outs)
        bound = None if checks.is_on() else CALLS.get(key)
        if bound is None:
            require_fit(self._plan, self.executor, name, arrays, outs)
            bound = self._bind(name, arrays, outs)
            if not checks.is_on():
                CALLS.put(key, bound, self._owner)
        elif outs and bound.may_overlap(arrays, outs):
            require_fit(self._plan, self.executor, name, arrays, outs)
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
        later: Sequence[str] = (),
    ) -> BoundPlan:
        """Bind a pass to the layouts of arrays that `require_fit` has accepted.

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
        later : sequence of str
            Passes that the caller will probably run next. On a GPU, kernels of all passes are compiled in parallel.

        Returns
        -------
        BoundPlan
        """
        plan = self._plan if self._lists is None else self._lists.shared
        if later and self.executor == "gpu" and not plan.is_empty:
            passes = (plan.passes[each] for each in (name, *later) if each in plan.passes)
            (machine or gpu.current_target()).prepare(*passes)
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
        require_own_device(self._plan)
        gpu.make_ready(self._plan)


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


def with_numbers(ready: Plan, numbers: tuple[int, ...]) -> Plan:
    """Return a plan for calls with a different dropout seed, which shares all launches."""
    reseeded = replace(ready, _numbers=numbers)
    object.__setattr__(reseeded, "_owner", ready._owner)
    return reseeded


def named_gradients(problem: Problem, results: Sequence[Array]) -> Gradients:
    """Return gradients, which are in the order of `KernelPlan.gradients`, by name."""
    dq, dk, dv, *others = results
    return Gradients(dq, dk, dv, dict(zip(problem.wrt, others)))
