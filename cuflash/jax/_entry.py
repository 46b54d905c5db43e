"""The entry of all calls on JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..arrays import flag_reasons, is_array
from ..errors import refuse
from ..layouts import is_tracer
from ..planning.options import Options
from ..scores import Score
from ._call import JaxCall
from ._checks import array_reasons, has_no_data, holds_data, require, traced_reasons
from ._primitives import bind, executed, pass_of


def called(q: Any, k: Any, v: Any, options: Options, return_lse: bool) -> Any:
    """Compute `attention` with its options as one value."""
    options = options._replace(
        score=_with_arrays_of_jax(options.score), bias=_of_jax(options.bias), sink=_of_jax(options.sink)
    )
    executor = options.executor
    refuse(flag_reasons("return_lse", return_lse) + traced_reasons(options))
    call, arrays, options = JaxCall.of(_of_jax(q), _of_jax(k), _of_jax(v), options)
    if isinstance(executor, str) and all(map(holds_data, map(type, arrays.values()))):
        o, lse = executed(pass_of(call, "forward", arrays), list(arrays.values()))
        return (o, lse) if return_lse else o
    refuse(array_reasons(arrays))
    if not isinstance(executor, str) or any(map(has_no_data, arrays.values())):
        require(arrays, options)
    o, lse = bind(call, "forward", arrays)
    return (o, lse) if return_lse else o


def _of_jax(value: Any) -> Any:
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


def _with_arrays_of_jax(score: Any) -> Any:
    """Return a Score over JAX arrays instead of NumPy arrays; any other value unchanged."""
    if not isinstance(score, Score) or not any(isinstance(array, np.ndarray) for array in score.arrays.values()):
        return score
    arrays = {name: _of_jax(array) for name, array in score.arrays.items()}
    if all(array.dtype == score.arrays[name].dtype for name, array in arrays.items()):
        return score._with_arrays(arrays)
    return Score._of_reserved(score.function, **arrays)
