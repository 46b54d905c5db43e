"""Derivatives of the passes: rules that express each derivative by the same four passes.

The pass "backward_jvp" reads o_dot and lse_dot, which "jvp" returns for the same tangents. Its rules treat it as a
function of the tangents alone, so that its transpose has no cotangents for o_dot and lse_dot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeAlias, TypeVar

import jax
from jax.interpreters import ad

from ..arrays import ShapeDtype
from ..planning.options import DOT
from ._primitives import PRIMITIVES, THIRD, bind
from ._runs import Pass

_TWICE = ".dot.dot"  # suffix of the name of an array's second tangent
_OF_RESULTS = ("do", "dlse", "o", "lse")
T = TypeVar("T")
Arrays: TypeAlias = Sequence["jax.Array"]
Named: TypeAlias = dict[str, "jax.Array"]
Tangents: TypeAlias = Sequence["jax.Array | ad.Zero"]
Operands: TypeAlias = Sequence["jax.Array | ad.UndefinedPrimal"]  # of a linear pass; its linear ones are undefined
Transposed: TypeAlias = list["jax.Array | None"]


def _is_zero(tangent: jax.Array | ad.Zero) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _full(tangent: jax.Array | ad.Zero, like: jax.Array | ShapeDtype) -> jax.Array:
    """Return a tangent or cotangent as an array."""
    return jax.numpy.zeros(like.shape, like.dtype) if isinstance(tangent, ad.Zero) else tangent


def _zeros(values: Arrays) -> list[ad.Zero]:
    return [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in values]


def _nonzero(names: Sequence[str], tangents: Tangents) -> Named:
    return {name: tangent for name, tangent in zip(names, tangents) if not _is_zero(tangent)}


def _with_suffix(arrays: Mapping[str, T], suffix: str = DOT) -> dict[str, T]:
    return {f"{name}{suffix}": array for name, array in arrays.items()}


def _shapes(one: Pass, suffix: str = DOT) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of a pass by name, and those of their tangents."""
    return one.of | _with_suffix({name: shape for name, shape in one.of.items() if not name.endswith(DOT)}, suffix)


def _base(one: Pass, arrays: Operands) -> Named:
    """Return the arrays of a pass that are not tangents, by name."""
    return {name: array for name, array in zip(one.names, arrays) if not name.endswith(DOT)}


def _summed(gradient: jax.Array, like: jax.core.ShapedArray) -> jax.Array:
    """Return a gradient summed over the axes along which its array was broadcast."""
    shape = tuple(like.shape)
    if tuple(gradient.shape) == shape:
        return gradient
    missing = gradient.ndim - len(shape)
    axes = [axis for axis in range(gradient.ndim) if axis < missing or shape[axis - missing] != gradient.shape[axis]]
    return gradient.sum(axis=tuple(axes), keepdims=True).reshape(shape)


def _transposed(one: Pass, arrays: Operands, results: Named) -> Transposed:
    """Return the cotangents of a linear pass in the order of its arrays; None for nonlinear arguments."""
    return [
        _summed(results[name], array.aval) if ad.is_undefined_primal(array) and name in results else None
        for name, array in zip(one.names, arrays)
    ]


def _linear(one: Pass, arrays: Operands, suffix: str) -> list[str]:
    """Return the names, without suffix, of the arrays with respect to which a pass is transposed."""
    names = (name for name, array in zip(one.names, arrays) if ad.is_undefined_primal(array))
    return [name.removesuffix(suffix) for name in names]


def _wrt(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that belong to operands."""
    return tuple(name for name in names if name not in ("q", "k", "v", *_OF_RESULTS))


def _gradients(
    one: Pass, name: str, arrays: Named, shapes: Mapping[str, tuple[int, ...]], wrt: tuple[str, ...]
) -> Named:
    """Return the gradients that a pass computes, or their tangents, by the names of the arrays."""
    return dict(zip(("q", "k", "v", *wrt), bind(one.call, name, arrays, shapes, wrt)))


def _cotangents(cotangents: Tangents, one: Pass) -> Named:
    """Return do and, if it is not zero, dlse."""
    (do, dlse), (o, _) = cotangents, one.results
    return {"do": _full(do, o)} | ({} if isinstance(dlse, ad.Zero) else {"dlse": dlse})


def _forward_jvp(one: Pass, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
    arrays, dots = dict(zip(one.names, primals)), _nonzero(one.names, tangents)
    o, lse = bind(one.call, "forward", arrays, one.of)
    if not dots:
        return [o, lse], _zeros([o, lse])
    arrays |= {"o": o, "lse": lse, **_with_suffix(dots)}
    return [o, lse], bind(one.call, "jvp", arrays, _shapes(one))


def _jvp_jvp(one: Pass, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
    arrays, dots = dict(zip(one.names, primals)), _nonzero(one.names, tangents)
    results, base = bind(one.call, "jvp", arrays, one.of), _base(one, primals)
    parts = []
    again = {name: dot for name, dot in dots.items() if name.endswith(DOT)}
    if again:
        parts.append(bind(one.call, "jvp", base | again, one.of))
    twice = {name: dot for name, dot in dots.items() if not name.endswith(DOT) and name not in _OF_RESULTS}
    if twice:
        arrays |= dict(zip((f"o{DOT}", f"lse{DOT}"), results)) | _with_suffix(twice, _TWICE)
        parts.append(bind(one.call, "curvature", arrays, _shapes(one, _TWICE)))
    if not parts:
        return results, _zeros(results)
    return results, parts[0] if len(parts) == 1 else [first + second for first, second in zip(*parts)]


def _jvp_transpose(one: Pass, cotangents: Tangents, *arrays: jax.Array | ad.UndefinedPrimal) -> Transposed:
    wrt = _wrt(_linear(one, arrays, DOT))
    read = _cotangents(cotangents, one) | _base(one, arrays)
    return _transposed(one, arrays, _with_suffix(_gradients(one, "backward", read, one.of, wrt)))


def _curvature_transpose(one: Pass, cotangents: Tangents, *arrays: jax.Array | ad.UndefinedPrimal) -> Transposed:
    wrt = _wrt(_linear(one, arrays, _TWICE))
    known = {name: array for name, array in zip(one.names, arrays) if not name.endswith(_TWICE)}
    results = _gradients(one, "backward_jvp", _cotangents(cotangents, one) | known, one.of, wrt)
    return _transposed(one, arrays, _with_suffix(results, _TWICE))


def _backward_jvp(one: Pass, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
    arrays, dots = dict(zip(one.names, primals)), _nonzero(one.names, tangents)
    results = bind(one.call, "backward", arrays, one.of, one.wrt)
    of_cotangents = {name: dots.pop(name) for name in ("do", "dlse") if name in dots}
    of_results = {f"{name}{DOT}": _full(dots.pop(name, ad.Zero(None)), arrays[name]) for name in ("o", "lse")}
    if dots:
        read = arrays | of_results | _with_suffix(dots | of_cotangents)
        return results, bind(one.call, "backward_jvp", read, _shapes(one), one.wrt)
    if not of_cotangents:
        return results, _zeros(results)
    read = {name: array for name, array in arrays.items() if name not in ("do", "dlse")}
    do = of_cotangents.get("do", ad.Zero(None))
    read = {"do": _full(do, arrays["do"])} | {name: each for name, each in of_cotangents.items() if name != "do"} | read
    return results, bind(one.call, "backward", read, one.of, one.wrt)


def _backward_transpose(one: Pass, cotangents: Tangents, *arrays: jax.Array | ad.UndefinedPrimal) -> Transposed:
    read = {name: array for name, array in zip(one.names, arrays) if name not in ("do", "dlse")}
    dots = _nonzero(("q", "k", "v", *one.wrt), cotangents)
    results = bind(one.call, "jvp", read | _with_suffix(dots), _shapes(one))
    return _transposed(one, arrays, dict(zip(("do", "dlse"), results)))


def _second_jvp(one: Pass, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
    arrays, dots = dict(zip(one.names, primals)), _nonzero(one.names, tangents)
    if any(not name.endswith(DOT) for name in dots):
        raise NotImplementedError(THIRD)
    results = bind(one.call, "backward_jvp", arrays, one.of, one.wrt)
    if not dots:
        return results, _zeros(results)
    zeros = {f"{name}{DOT}": _full(ad.Zero(None), arrays[name]) for name in ("o", "lse")}
    return results, bind(one.call, "backward_jvp", _base(one, primals) | zeros | dots, one.of, one.wrt)


def _second_transpose(one: Pass, cotangents: Tangents, *arrays: jax.Array | ad.UndefinedPrimal) -> Transposed:
    base, dots = _base(one, arrays), _nonzero(("q", "k", "v", *one.wrt), cotangents)
    read = {name: array for name, array in base.items() if name not in ("do", "dlse")}
    of_results = bind(one.call, "jvp", read | _with_suffix(dots), _shapes(one))
    wrt = _wrt(_linear(one, arrays, DOT))
    read = base | dict(zip((f"o{DOT}", f"lse{DOT}"), of_results)) | _with_suffix(dots)
    results = _gradients(one, "backward_jvp", read, _shapes(one), wrt) | dict(zip(("do", "dlse"), of_results))
    return _transposed(one, arrays, _with_suffix(results))


def _third(one: Pass, primals: Arrays, tangents: Tangents) -> NoReturn:
    raise NotImplementedError(THIRD)


def _rule(of_pass: Callable[..., T]) -> Callable[..., T]:
    """Return a rule as JAX calls it, with the fields of a pass as keywords."""
    return lambda *arguments, **parameters: of_pass(Pass(**parameters), *arguments)


def differentiate_passes() -> None:
    """Register the differentiation rules of all passes with JAX."""
    jvps = {
        "forward": _forward_jvp, "jvp": _jvp_jvp, "backward": _backward_jvp, "backward_jvp": _second_jvp,
        "curvature": _third,
    }  # fmt: skip
    transposes = {
        "jvp": _jvp_transpose, "backward": _backward_transpose, "backward_jvp": _second_transpose,
        "curvature": _curvature_transpose,
    }  # fmt: skip
    ad.primitive_jvps.update({PRIMITIVES[name]: _rule(of_pass) for name, of_pass in jvps.items()})
    ad.primitive_transposes.update({PRIMITIVES[name]: _rule(of_pass) for name, of_pass in transposes.items()})
