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


FILE = "study/calculators.py"
FAULTS = {
    bytes_are_right: {
        "values are as wide as keys": Edit(
            FILE, "_bytes_of_token", "int(head_dim) + int(value_dim)", "2 * int(head_dim)"
        ),
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
