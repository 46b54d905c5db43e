"""The function that pulls gradients back through one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..arrays import Array
from ..executors import checks
from ..executors._bound_plan import BoundPlan
from ..executors._layout_key import layout_key
from ..keywords import explains_keywords
from ..planning._call_cache import CALLS
from ..plans import Gradients, Plan, named_gradients
from .unchanged import Held, checksums, held, require_unchanged


@dataclass(frozen=True, eq=False, repr=False)
class Pullback:
    """Function that pulls gradients back through one call of attention; `cuflash.attention_vjp` returns it with o.

    All arrays except the cotangents have the layouts of the planned call, so the layout of the cotangents alone selects
    the launches. Their contents must be unchanged, too: NumPy's o and lse are read-only while this object or a copy of
    it exists, and on the host, or with CUFLASH_CHECK=1, checksums of all these arrays are compared.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 16, 8), np.float32)
    >>> o, vjp = cuflash.attention_vjp(q, k, v)
    >>> vjp(o).dq.shape
    (2, 16, 8)
    """

    ready: Plan
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    operands: Mapping[str, Array] = field(default_factory=dict)
    _sums: Mapping[str, int] = field(default_factory=dict, init=False)
    _held: tuple[Held, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        is_on_host = self.ready.executor != "gpu"
        if is_on_host or checks.is_on():
            object.__setattr__(self, "_sums", checksums(self._read()))
        if is_on_host:
            object.__setattr__(self, "_held", held(self.o, self.lse))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": ()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        object.__setattr__(self, "_held", held(self.o, self.lse))

    def _read(self) -> dict[str, Array]:
        """Return the arrays that the backward pass reads in addition to the cotangents, by name."""
        is_of_forward = self.ready._plan.problem.is_of_forward
        operands = {name: array for name, array in self.operands.items() if not is_of_forward(name)}
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o, "lse": self.lse, **operands}

    @explains_keywords
    def __call__(self, do: Array, dlse: Array | None = None) -> Gradients:
        """Return the gradients of sum(do * o) + sum(dlse * lse).

        Raises
        ------
        TypeError
            An argument is not an array.
        UnsupportedProblem
            An argument does not match o or lse. The message lists all reasons.
        RuntimeError
            An array that the forward pass read or returned has changed since then.
        """
        if self._sums:
            require_unchanged(self._read(), self._sums)
        ready, problem = self.ready, self.ready._plan.problem
        arrays = {"do": do, "q": self.q, "k": self.k, "v": self.v, "o": self.o, "lse": self.lse}
        cotangents = ("do",) if dlse is None else ("do", "dlse")
        if dlse is not None:
            arrays["dlse"] = dlse
        arrays |= ready._read_by("backward", self.operands)
        layout = layout_key(*map(arrays.__getitem__, cotangents))
        if layout is None:
            arrays = ready._as_planned(arrays)
            layout = layout_key(*map(arrays.__getitem__, cotangents))
        key = None if layout is None or checks.is_on() else ("vjp", id(ready._owner), layout)
        bound: BoundPlan | None = CALLS.get(key)
        if bound is None:
            ready._require("backward", arrays, {})
            bound = ready._bind("backward", arrays, pins=True)
            if key is not None:
                CALLS.put(key, bound, ready._owner)
        return named_gradients(problem, bound.run(arrays, numbers=ready._numbers))
