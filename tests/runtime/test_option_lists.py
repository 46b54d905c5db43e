"""The options of attention are the same in every library: names, order, kinds, defaults and annotations."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

import cuflash
from cuflash.planning.options import CallOptions, Options

MISSING = {"torch": set[str](), "jax": {"out"}}  # arrays of JAX cannot be written to


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
    assert listed(module.attention, set()) == listed(cuflash.attention, MISSING[library])


def test_options_as_one_value_are_those_of_calls() -> None:
    """Type checkers see `CallOptions`, and the library passes `Options` on."""
    of_call = {name: default for name, _, default, _ in listed(cuflash.attention, {"out", "return_lse"})}
    fields = {name: default for name, default in Options._field_defaults.items() if name in of_call}
    assert [*fields] == [*of_call] == [*CallOptions.__annotations__] and fields == of_call
