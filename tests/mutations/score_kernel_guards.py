"""What must see the faults of score functions in kernels, and in the text that is printed of them.

Results of the probe are small multiples of 1/16: a fault makes others.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

from cuflash.compiler import source as sources
from executors import SIM
from test_score_kernels import MASKS, WRT, Probe, check_few_queries, check_past_the_end, check_shared_elements

SIGNS = (AssertionError, ValueError)


def _check(kernel: str, mask: str, wrt: tuple[str, ...] = WRT, **options: Any) -> None:
    made = Probe("float32" if kernel in ("simt", "naive") else "float16", MASKS[mask], batch=(2,), lengths=(37, 45))
    made.check(made.found(replace(SIM, kernel=kernel, **options), wrt))


def simt_is_exact() -> None:
    """In one walk and in two, where a step is masked and where none is."""
    _check("simt", "lengths")
    _check("simt", "nothing")
    _check("simt", "lengths", ("at",), deterministic=True)


def naive_is_exact() -> None:
    _check("naive", "lengths")


def sm80_is_exact() -> None:
    """In one walk and in two."""
    _check("sm80", "lengths")
    _check("sm80", "lengths", ("at",), deterministic=True)


def sm90_is_exact() -> None:
    _check("sm90", "lengths", ("at",), deterministic=True)


def packed_heads_are_exact() -> None:
    check_few_queries(4, (3, 600))


def nothing_past_the_end_matters() -> None:
    check_past_the_end("sm80")


def warps_that_share_elements_are_exact() -> None:
    check_shared_elements()


def printed_functions_are_exact(library: ModuleType) -> None:
    """By a copy of the library, whose kernels are the installed one's."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    made = Probe("float32", batch=(2, 3), lengths=(5, 21))
    made.check(made.found(replace(SIM, kernel="simt"), library=library))
