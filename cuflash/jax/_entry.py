"""The entry of all calls on JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from ..arrays import Array, describe, flag_reasons, is_array
from ..errors import refuse
from ..executors import checks
from ..layouts import is_tracer
from ..planning.dropout_launches import numbers_of
from ..planning.lookup import Lookup, lookup
from ..planning.options import Options
from ..scores import Score
from ._call import JaxCall, dtypes_of, from_cache, has_key, layout_of, mask_over, separated
from ._checks import array_reasons, has_data, holds_data, require, traced_reasons
from ._primitives import bind

Memory = Literal["heads_first", "tokens_first"]
# Runs a call on its options without arrays, its lookup and its arrays by name.
_Entry: TypeAlias = "Callable[[Options, Lookup, dict[str, jax.Array]], jax.Array | tuple[jax.Array, jax.Array]]"


def called(
    q: Array, k: Array, v: Array, options: Options, memory: Memory, return_lse: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute `attention` with its options as one value.

    Calls with equal keys share a jitted function, which JAX compiles for each layout of arrays. Gradients outside of
    `jax.jit` are those of this function: they are compiled once, too. Calls with equal contents of a mask share the
    plans and functions of their passes instead: XLA would compile a function for the contents of each mask.
    Arrays with data have heads before tokens in memory, whatever `memory` says.
    """
    refuse(_memory_reasons(memory))
    options = _with_arrays_of_jax(options)
    without, arrays = separated(_of_jax(q), _of_jax(k), _of_jax(v), options)
    looked_up, key, names = lookup(without, layout_of), None, tuple(arrays)
    have_data = all(map(holds_data, map(type, arrays.values()))) or all(map(has_data, arrays.values()))
    if have_data and type(return_lse) is bool and has_key(looked_up, names) and not checks.is_on():
        key = looked_up.key("jax", names, numbers_of(without.dropout), return_lse)

    def make() -> _Entry:
        refuse(flag_reasons("return_lse", return_lse) + traced_reasons(options))
        refuse(array_reasons(arrays))
        if not have_data or not isinstance(options.executor, str):
            require(arrays, without._replace(mask=mask_over(without.mask, arrays)))
        tokens_first = memory == "tokens_first" and not have_data
        run = partial(_forward, without, names, tokens_first, return_lse)
        if key is not None:
            call = JaxCall(without, dtypes_of(arrays), looked_up, False)
            if call.holds_contents:
                return partial(_with_contents, call.own, return_lse)
            run = jax.jit(run)
        return lambda options, looked_up, arrays: run(*arrays.values())

    return from_cache(looked_up, key, make)(without, looked_up, arrays)


def _with_contents(
    own: dict[Hashable, Any], return_lse: bool, options: Options, looked_up: Lookup, arrays: dict[str, jax.Array]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Run the forward pass of a call whose mask has contents; equal contents share `own`."""
    o, lse = bind(JaxCall(options, dtypes_of(arrays), looked_up, False, own=own), "forward", arrays)
    return (o, lse) if return_lse else o


def _forward(
    options: Options, names: tuple[str, ...], tokens_first: bool, return_lse: bool, *arrays: jax.Array
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Run the forward pass of a call on arrays by name; `options` come from `separated`."""
    named = dict(zip(names, arrays))
    o, lse = bind(JaxCall.of(options, named, tokens_first), "forward", named)
    return (o, lse) if return_lse else o


def _memory_reasons(memory: object) -> list[str]:
    if isinstance(memory, str) and memory in get_args(Memory):
        return []
    return [f"memory must be 'heads_first' or 'tokens_first'; got {describe(memory)}"]


def _of_jax(value: Array) -> Array:
    """Return a NumPy array, or a list of numbers, as a JAX array in a dtype that JAX supports; other values unchanged.

    It is a copy, since later changes of the NumPy array must not affect gradients. Tracers that hold a NumPy array are
    copied, too.
    """
    kind: Any = type(value)
    if value is None or holds_data(kind):
        return value
    held = value.to_concrete_value() if is_tracer(value) else value
    is_numpy = isinstance(held, np.ndarray) and is_array(held)
    return jax.numpy.array(value) if is_numpy or isinstance(value, list) else value


def _with_arrays_of_jax(options: Options) -> Options:
    """Return options with JAX arrays instead of NumPy arrays in the score function, the bias and the sink."""
    score, bias, sink = options.score, options.bias, options.sink
    if score is None and bias is None and sink is None:
        return options
    if isinstance(score, Score) and any(isinstance(array, np.ndarray) for array in score.arrays.values()):
        arrays = {name: _of_jax(array) for name, array in score.arrays.items()}
        is_same = all(array.dtype == score.arrays[name].dtype for name, array in arrays.items())
        score = score._with_arrays(arrays) if is_same else Score._of_reserved(score.function, **arrays)
    return options._replace(score=score, bias=_of_jax(bias), sink=_of_jax(sink))
