"""Options are the same in every library: names, order, kinds, defaults and annotations."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import pytest

import cuflash
from cuflash.distributed import ContextParallel
from cuflash.planning.options import CallOptions, Options

MISSING = {"torch": set[str](), "jax": {"out"}}  # arrays of JAX cannot be written to
OWN = {"torch": set[str](), "jax": {"memory"}}  # and have no strides, which say this in other libraries


def listed(call: Any, without: set[str]) -> list[tuple[str, Any, Any, Any]]:
    """Return what a signature says of all parameters except those of q, k and v, whose types differ."""
    parameters = inspect.signature(call).parameters.values()
    of_arrays = [each.name for each in parameters][:3]
    assert of_arrays == ["q", "k", "v"]
    others = (each for each in parameters if each.name not in {*of_arrays, *without})
    return [(each.name, each.kind, each.default, each.annotation) for each in others]


@pytest.mark.parametrize("library", MISSING)
def test_options_of_each_library_are_those_of_numpy(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    module = import_module(f"cuflash.{library}")
    assert listed(module.attention, OWN[library]) == listed(cuflash.attention, MISSING[library])


def test_options_as_one_value_are_those_of_calls() -> None:
    """Type checkers see `CallOptions`, and the library passes `Options` on."""
    of_call = {name: default for name, _, default, _ in listed(cuflash.attention, {"out", "return_lse"})}
    fields = {name: default for name, default in Options._field_defaults.items() if name in of_call}
    assert [*fields] == [*of_call] == [*CallOptions.__annotations__] and fields == of_call


METHODS = ("__init__", "shard", "unshard", "attention")  # those that PyTorch's class has itself
TYPES = {"Tensor": "Array", "CallOptions": "VjpOptions"}  # a tensor has its gradient from autograd, without `wrt`


@pytest.mark.parametrize("method", METHODS)
def test_context_parallelism_of_torch_takes_what_that_of_numpy_takes(method: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    torch_class: Any = import_module("cuflash.torch").ContextParallel
    of_torch, of_numpy = (signature_of(getattr(each, method)) for each in (torch_class, ContextParallel))
    if method == "__init__":  # the group comes first, and may be one of PyTorch
        assert [of_torch.pop(1)[0], of_numpy.pop(1)[0]] == ["process_group", "group"]
    assert of_torch == of_numpy


def test_context_parallelism_of_torch_has_no_other_methods() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    torch_class: Any = import_module("cuflash.torch").ContextParallel
    assert {name for name in vars(torch_class) if name in METHODS or not name.startswith("_")} == {*METHODS}
    assert issubclass(torch_class, ContextParallel)


def signature_of(method: Any) -> list[tuple[str, Any, Any, str]]:
    """Return what a signature says of all parameters, with the names of types that PyTorch's class replaces."""
    parameters = inspect.signature(method).parameters.values()

    def renamed(annotation: Any) -> str:
        return re.sub(r"\w+", lambda word: TYPES.get(word[0], word[0]), str(annotation))

    return [(each.name, each.kind, each.default, renamed(each.annotation)) for each in parameters]
