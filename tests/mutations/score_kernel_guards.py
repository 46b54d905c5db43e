"""Guards for faults of score functions in kernels, and in the text that is printed for them.

Results of the probe are small multiples of 1/16, and a fault changes them.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import cuflash
import numpy as np
from cuflash import masks, scores
from cuflash.compiler import source as sources
from cuflash.executors.sim import Simulator
from cuflash.sim import Schedule
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import SIM
from poison import call
from probing import assert_expected, exact_sums
from test_score_kernels import (
    MASKS, WRT, Probe, check_few_queries, check_past_the_end, check_shared_elements, normal_call, normal_example,
)  # fmt: skip
from test_sm90_scores import check_hidden_queries

SIGNS = (AssertionError, ValueError)  # exceptions by which guards see a fault


def _check(kernel: str, mask: str, wrt: tuple[str, ...] = WRT, **options: Any) -> None:
    made = Probe("float32" if kernel in ("simt", "naive") else "float16", MASKS[mask])
    made.check(made.found(replace(SIM, kernel=kernel, **options), wrt))


def _masked_keys_stay_hidden(kernel: str) -> None:
    """A cap that came after the mask would make finite scores of -inf."""
    dtype = np.float32 if kernel in ("simt", "naive") else np.float16
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 16)).astype(dtype)
    example = Example(q=q, k=k, v=v, mask=masks.Causal("top_left"), score=scores.softcap(2.0))
    o, lse = cuflash.attention(
        q, k, v, executor="sim", kernel=kernel, causal="top_left", softcap=2.0, return_lse=True
    )
    assert_within_bounds(SIM.rounded(example), o=o, lse=lse)


def simt_is_exact() -> None:
    """dQ is added up or has a kernel of its own; some steps are masked, and some calls have no mask."""
    _masked_keys_stay_hidden("simt")
    _check("simt", "lengths")
    _check("simt", "nothing")
    _check("simt", "lengths", ("at",), deterministic=True)


def simt_waits_for_its_warps() -> None:
    """Gradients with a score function are within their bounds with threads out of order, in poisoned memory."""
    example = Structure(num_heads=2, seqlen_q=150, seqlen_kv=90, head_dim=24, value_dim=20).example()
    example = example.but(score=scores.softcap(2.0))
    made = cuflash.plan(example.q, example.k, example.v, score=example.score, executor="sim", kernel="simt")
    for seed in range(3):
        machine = Simulator(Schedule(seed=seed, order="random"))
        call(example, SIM, machine, check=partial(assert_within_bounds, example), made=made)


def naive_is_exact() -> None:
    _masked_keys_stay_hidden("naive")
    _check("naive", "lengths")


def sm80_is_exact() -> None:
    """dQ is added up or has a kernel of its own, over several tiles of keys."""
    _masked_keys_stay_hidden("sm80")
    made = Probe("float16", None, batch=(2,), lengths=(20, 150))
    made.check(made.found(replace(SIM, kernel="sm80"), ("at", "row")))
    _check("sm80", "lengths")
    _check("sm80", "lengths", ("at",), deterministic=True)


def sm90_is_exact() -> None:
    _masked_keys_stay_hidden("sm90")
    _check("sm90", "lengths", ("at",), deterministic=True)


def hopper_gradients_are_exact() -> None:
    """Tiles have 128 queries and 64, there are several tiles of keys, and a function hides some queries."""
    _check("sm90", "lengths")
    made = Probe("float16", None, batch=(2,), lengths=(70, 140), dim=80)
    made.check(made.found(replace(SIM, kernel="sm90")))
    check_hidden_queries(replace(SIM, kernel="sm90"))


def packed_heads_are_exact() -> None:
    check_few_queries(4, (3, 600))


def nothing_past_the_end_matters() -> None:
    check_past_the_end("sm80")


def warps_that_share_elements_are_exact() -> None:
    check_shared_elements()


def printed_functions_are_exact(library: ModuleType) -> None:
    """The copy of the library prints the functions; its kernels are those of the installed one."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    made = Probe("float32", batch=(2, 3), lengths=(5, 21))
    made.check(made.found(replace(SIM, kernel="simt"), library=library))


def _repeatable_gradients_are_right(library: ModuleType) -> None:
    found = normal_call(SIM, "simt", library, deterministic=True)
    assert_within_bounds(normal_example("simt"), others=found)


def exact_sums_are_right() -> None:
    launch = exact_sums("float32")
    assert_expected(launch, launch.on_simulator())


def repeatable_sums_are_right() -> None:
    _repeatable_gradients_are_right(cuflash)


def repeatable_sums_are_planned(library: ModuleType) -> None:
    """The copy of the library makes the plans; its kernels are those of the installed one."""
    importlib.import_module(f"{library.__name__}.compiler.source").KERNELS = sources.KERNELS
    _repeatable_gradients_are_right(library)
