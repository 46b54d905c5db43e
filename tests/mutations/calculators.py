"""Faults in the calculators of memory, each with the probe that must see it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from mutations.calls import refuses, takes
from mutations.planting import Edit

SIGNS = (AssertionError,)  # exceptions by which guards see a fault
MODEL = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": np.float16}


def bytes_are_right(library: ModuleType) -> None:
    assert library.kv_cache_bytes(**MODEL, tokens=5, value_dim=4) == 3 * 2 * (8 + 4) * 5 * 2
    assert library.kv_cache_bytes(**MODEL, tokens=[5, 17], page_size=16) == 3 * 2 * 16 * 48 * 2


def lengths_are_right(library: ModuleType) -> None:
    assert library.largest_length(192 * 50 - 1, **MODEL) == 49
    assert library.largest_length(2 * 192 * 50, **MODEL, batch=2, page_size=16) == 48


def memory_is_right(library: ModuleType) -> None:
    q, k = (library.ShapeDtype(shape, np.float16) for shape in ((2, 4, 30, 8), (2, 50, 8)))
    told = library.memory(library.plan(q, k, k, device=library.DeviceSpec.gpu("A100")))
    assert told.inputs == told.gradients == 2 * (2 * 4 * 30 * 8 + 2 * 2 * 50 * 8)
    assert told.results == 2 * 2 * 4 * 30 * 8 + 4 * 2 * 4 * 30
    assert told.forward == told.inputs + told.results + told.workspace


FILE = "study/calculators.py"
FAULTS = {
    bytes_are_right: {
        "values are as wide as keys": Edit(
            FILE, "_bytes_of_token", "int(head_dim) + int(value_dim)", "2 * int(head_dim)"
        ),
        "pages are rounded down": Edit(FILE, "kv_cache_bytes", "-(-int(each) // page)", "(int(each) // page)"),
        "pages are rounded over all sequences": Edit(
            FILE, "kv_cache_bytes", "sum(-(-int(each) // page) * page for each in listed)",
            "(-(-sum(listed) // page) * page)",
        ),
        "layers are not counted": Edit(FILE, "_bytes_of_token", "int(num_layers) *", ""),
    },
    lengths_are_right: {
        "the batch is not counted": Edit(FILE, "largest_length", "int(batch) * page", "page"),
        "a page is a token": Edit(FILE, "largest_length", "a_token) * page", "a_token)"),
    },
    memory_is_right: {
        "lse is forgotten": Edit(FILE, "memory", "problem.dtype.itemsize + lse", "problem.dtype.itemsize"),
        "gradients are results": Edit(FILE, "memory", "gradients=inputs", "gradients=lse"),
        "a forward pass takes nothing beside": Edit(FILE, "Memory.forward", "+ self.workspace", ""),
    },
    refuses(lambda library: library.largest_length(float("nan"), **MODEL), "available_bytes must be a number"): {
        "room is anything": Edit(FILE, "largest_length", "if not (is_number(room) and", "if not (True or"),
    },
    refuses(lambda library: library.kv_cache_bytes(**MODEL | {"head_dim": 0}, tokens=3), "head_dim must be an int"): {
        "extents may be 0": Edit(FILE, "_count_reasons", "and count >= 1)", "and count >= 0)"),
    },
    takes(lambda library: library.memory(library.plan(*[np.ones((3, 4))] * 3).plan).inputs == 3 * 3 * 4 * 8): {
        "plans of kernels are none": Edit(
            FILE, "memory", "isinstance(plan, Plan) else plan", "isinstance(plan, Plan) else None"
        ),
    },
}  # fmt: skip
