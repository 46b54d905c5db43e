"""Calls with tangents, whose passes run one after the other, after all arrays have been checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ..arrays import Array, is_array, namespace
from ..errors import UnsupportedProblem, refuse
from ..layouts import overlap
from ..planning.options import DOT, Directions, Options
from ..planning.tangents import shown
from ..plans.conversion import Out, as_arrays, name_of_out, named_outputs
from ..plans.plan import Gradients, named_gradients
from ._forward import Forward, run


class Pushed(NamedTuple):
    """A forward pass that has run, and its tangents.

    Attributes
    ----------
    forward : Forward
    dots : dict of arrays
        The tangents of the inputs, by their names in passes.
    o_dot, lse_dot : array
    """

    forward: Forward
    dots: dict[str, Array]
    o_dot: Array
    lse_dot: Array


class Pulled(NamedTuple):
    """Results of a call with gradients and their tangents."""

    o: Array
    lse: Array
    gradients: Gradients
    gradients_dot: Gradients


def push(
    q: Array, k: Array, v: Array, directions: Directions, options: Options, out: Out = None, return_lse: bool = True,
    later: Sequence[str] = ("jvp",),
) -> Pushed:  # fmt: skip
    """Run the passes "forward" and "jvp" on a user's arguments; only the first of identical calls checks them."""
    if out is not None:
        refuse(_overwritten_reasons(out, directions))
    forward = run(q, k, v, options._replace(tangents=directions), out, return_lse, later)
    plan, dots = forward.plan, directions.arrays()
    tangents = {name: array for name, array in dots.items() if name.endswith(DOT)}
    moving = {name: array for name, array in tangents.items() if name not in (f"do{DOT}", f"dlse{DOT}")}
    if moving:
        o_dot, lse_dot = plan._run("jvp", {**_with_results(forward, "jvp"), **moving}, {})
    else:  # only the cotangents have tangents
        o_dot, lse_dot = map(namespace(forward.o).zeros_like, (forward.o, forward.lse))
    return Pushed(forward, dots, o_dot, lse_dot)


def pull(
    q: Array, k: Array, v: Array, do: Array, dlse: Array | None, tangents: Mapping[str, Array], options: Options,
    return_lse: bool,
) -> Pulled:  # fmt: skip
    """Run all four passes of a call."""
    cotangents = {"do": do} | ({} if dlse is None else {"dlse": dlse})
    directions, later = Directions("attention_hvp", dict(tangents), cotangents), ("jvp", "backward", "backward_jvp")
    pushed = push(q, k, v, directions, options, None, return_lse, later)
    forward, plan = pushed.forward, pushed.forward.plan
    arrays = {**cotangents, **_with_results(forward, "backward")}
    gradients = named_gradients(plan._plan.problem, plan._run("backward", arrays, {}))
    arrays |= pushed.dots | {f"o{DOT}": pushed.o_dot, f"lse{DOT}": pushed.lse_dot}
    return Pulled(
        forward.o, forward.lse, gradients, named_gradients(plan._plan.problem, plan._run("backward_jvp", arrays, {}))
    )


def _with_results(forward: Forward, name: str) -> dict[str, Array]:
    """Return the arrays of a call that another pass reads by name, with o and lse, which the call computed."""
    of_call = {each: forward.arrays[each] for each in ("q", "k", "v")} | {"o": forward.o, "lse": forward.lse}
    operands = {each: array for each, array in forward.arrays.items() if each not in of_call}
    return forward.plan._with_operands(name, of_call, operands)


def _overwritten_reasons(out: Out, directions: Directions) -> list[str]:
    """Return why a call cannot write to `out`: a later pass reads tangents, which must not change until then."""
    outs = named_outputs(out)
    named = {name_of_out(result, outs): each for result, each in outs.items()}
    tangents = {shown(name): each for name, each in directions.tangents.items()}
    try:
        arrays = as_arrays({**named, **tangents})
    except UnsupportedProblem:  # the call refuses these arrays
        return []
    return [
        f"{name} must not overlap {tangent} in memory: pass a separate array"
        for name, tangent in product(named, tangents)
        if is_array(arrays[name]) and is_array(arrays[tangent])
        and namespace(arrays[name]) is namespace(arrays[tangent]) and overlap(arrays[name], arrays[tangent])
    ]  # fmt: skip
