"""A primitive of JAX for each pass: its types, and how it is lowered and executed on each platform."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import jax
from jax._src import dispatch, util  # JAX has no public way to say what the last lines of this module say
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ._call import JaxCall
from ._runs import Pass, executable, run_by_xla
from ._sharding import partitioned

PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}  # JAX's names of platforms, in lowerings and of devices
THIRD = (
    "attention has first and second derivatives in JAX, and no jvp of jvp; a third derivative or a jvp of jvp was "
    "requested: take finite differences of the second or the first"
)


def bind(
    call: JaxCall, name: str, arrays: Mapping[str, jax.Array],
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}), wrt: tuple[str, ...] = (),
) -> list[jax.Array]:  # fmt: skip
    """Run a pass on arrays by name.

    Parameters
    ----------
    shapes : dict of tuple of int by name
        The shapes to which arrays are broadcast, if these differ from their own.
    """
    own = [shapes.get(each, array.shape) for each, array in arrays.items()]
    return bind_pass(Pass(call, name, tuple(arrays), tuple(own), wrt), *varying_alike(arrays.values()))


def bind_pass(one: Pass, *arrays: jax.Array) -> list[jax.Array]:
    """Run a pass on its arrays in order."""
    results: list[jax.Array] = PRIMITIVES[one.name].bind(*arrays, **one._asdict())
    return results


def varying_alike(values: Iterable[jax.Array]) -> list[jax.Array]:
    """Make all arrays vary over the mesh axes of `jax.shard_map` over which any of them varies."""
    arrays = list(values)
    kinds = [jax.typeof(each) for each in arrays if isinstance(each, jax.core.Tracer)]
    axes = frozenset[str]().union(*map(_varying_axes, kinds))
    if not axes:
        return arrays
    return [jax.lax.pcast(each, tuple(axes - _varying_axes(jax.typeof(each))), to="varying") for each in arrays]


Lowering: TypeAlias = "Callable[..., Sequence[mlir.Value]]"  # returns the values of a module's results


def _varying_axes(kind: jax.core.ShapedArray) -> frozenset[str]:
    """Return the mesh axes over which values of a type vary."""
    axes = kind.vma if hasattr(kind, "vma") else kind.mat.varying if hasattr(kind, "mat") else ()  # until JAX 0.9
    return frozenset(axes)


def _types(
    *kinds: jax.core.ShapedArray, late: _LateCallback | None = None, **parameters: Any
) -> list[jax.core.ShapedArray]:
    """Return the types of the results of a pass; within `jax.shard_map` they vary like the arrays."""
    like, results = kinds[0], Pass(**parameters).results
    if not _varying_axes(like):
        return [jax.core.ShapedArray(each.shape, each.dtype) for each in results]
    return [
        like.update(
            shape=each.shape, dtype=each.dtype, weak_type=False,
            sharding=like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * each.ndim)),
        )
        for each in results
    ]  # fmt: skip


def _lowered(platform: str) -> Lowering:
    def lowered(context: mlir.LoweringRuleContext, *values: mlir.Value, **parameters: Any) -> Any:
        module = context.module_context
        if _is_for_several_devices(module.axis_context):
            late = _LateCallback(len(module.host_callbacks))
            module.add_host_callback(late)
            run = partial(partitioned, partial(_bind_on_shard, late), Pass(**parameters))
        else:
            run = partial(run_by_xla, Pass(**parameters), platform, module.add_keepalive)
        return mlir.lower_fun(run, multiple_results=True)(context, *values)

    return lowered


def _is_for_several_devices(axis_context: Any) -> bool:
    """True if XLA partitions a module that is lowered, unlike those for one device and within `jax.shard_map`."""
    mesh = getattr(axis_context, "mesh", None)
    if mesh is not None:
        return bool(mesh.size > 1 and {*axis_context.manual_axes} != {*mesh.axis_names})
    return (getattr(axis_context, "num_devices", 1) or 1) > 1


class _LateCallback:
    """A function that XLA calls, which is set when XLA partitions the module that has it as its callback `number`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.function: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        assert self.function is not None
        return self.function(*arguments)


def _bind_on_shard(late: _LateCallback, one: Pass, *arrays: jax.Array) -> list[jax.Array]:
    results: list[jax.Array] = ON_SHARD[one.name].bind(*arrays, late=late, **one._asdict())
    return results


def _lowered_on_shard(platform: str) -> Lowering:
    """Return how a pass on one shard is lowered: its module is part of another, whose callback it sets."""

    def lowered(
        context: mlir.LoweringRuleContext, *values: mlir.Value, late: _LateCallback, **parameters: Any
    ) -> Any:
        module, run = context.module_context, partial(run_by_xla, Pass(**parameters), platform, None)
        while len(module.host_callbacks) < late.number:
            module.add_host_callback(None)
        results = mlir.lower_fun(run, multiple_results=True)(context, *values)
        late.function = module.host_callbacks[late.number]
        return results

    return lowered


def _executed(*arrays: jax.Array, **parameters: Any) -> list[jax.Array]:
    """Run a pass on arrays with data, by a function that the cache of calls holds."""
    one, in_memory = Pass(**parameters), tuple([array.shape for array in arrays])
    if one.call.tokens_first:  # arrays with data have heads first
        one = one._replace(call=replace(one.call, tokens_first=False))
    call, *key = one
    if call.holds_contents:
        devices = {device for array in arrays if isinstance(array, jax.Array) for device in array.devices()}
        if len(devices) == 1:
            make = partial(executable, one, in_memory, *devices)
            run = call.cached("jax executable", make, *key, in_memory, *devices, is_general=bool(call.held))
            if run is not None:
                return run(call.held, *arrays)
    traced: Callable[..., list[jax.Array]]
    traced = call.cached("jax pass", lambda: jax.jit(partial(bind_pass, one)), *key, in_memory)
    with jax.disable_jit(False):  # within `jax.disable_jit` the function would call this one again
        return traced(*arrays)


def _refused(*arrays: jax.Array, **parameters: Any) -> NoReturn:
    raise NotImplementedError(THIRD)


def _primitive(name: str, lowered: Callable[[str], Lowering]) -> Primitive:
    primitive = Primitive(f"cuflash_{name}")
    primitive.multiple_results = True
    primitive.def_impl(_executed)
    primitive.def_abstract_eval(_types)
    for platform, place in PLATFORMS.items():
        mlir.register_lowering(primitive, lowered(place), platform=platform)
    return primitive


_PASSES = ("forward", "jvp", "backward", "backward_jvp")
PRIMITIVES = {name: _primitive(name, _lowered) for name in _PASSES}
ON_SHARD = {name: _primitive(f"{name}_on_shard", _lowered_on_shard) for name in _PASSES}
dispatch.prim_requires_devices_during_lowering.update(PRIMITIVES.values())
# JAX's cache of types would keep masks and their lists otherwise.
getattr(util, "weakref_cache_key_types", set[type]()).add(JaxCall)
# The derivative of "jvp" with respect to everything except the tangents. It can only be transposed.
PRIMITIVES["curvature"] = _primitive("curvature", lambda place: _refused)
