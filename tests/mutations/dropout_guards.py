"""Guards that must see the faults of dropout: of Python, where the library is given to the guard, and of kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from cuflash.compiler import source as sources
from cuflash.dropout import Dropout
from cuflash.masks import BlockPattern, Sequences
from cuflash.testing import Structure, assert_within_bounds
from executors import check_simulated
from mutations.python_guards import part

from cuflash import sim

SIGNS = (AssertionError, ValueError, sim.SimulationError)  # exceptions by which guards see a fault
SEED = 0x9ABCDEF012345678
HEADS = {"num_heads": 4, "num_kv_heads": 2, "q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
SHORT = Structure(**HEADS, seqlen_q=40, seqlen_kv=33, dropout=Dropout(0.3, SEED, 5))
HALF = replace(SHORT, dtype="float16")


def the_host_is_right(library: ModuleType) -> None:
    """Results of the copy, which draws itself, are within bounds of the weights that the installed library drops."""
    example = SHORT.example()
    for seed in (SEED, np.array(SEED, np.uint64)):
        dropout = library.Dropout(0.3, seed, 5)
        assert np.array_equal(dropout.keep((2, 4, 40, 33)), SHORT.dropout.keep((2, 4, 40, 33)))
        (o, lse), vjp = library.attention_vjp(example.q, example.k, example.v, dropout=dropout, return_lse=True)
        results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))
        assert_within_bounds(example, **results)


def bounds_are_sharp(library: ModuleType) -> None:
    """The bounds of the copy equal those of the installed library."""
    example = SHORT.example()
    found = import_module(f"{library.__name__}.bounds").error_bound(
        example.q, example.k, example.v, example.do, dlse=example.dlse, dropout=library.Dropout(0.3, SEED, 5)
    )
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(found, name), getattr(example.bounds, name), rtol=1e-9)


def wrong_numbers_are_refused(library: ModuleType) -> None:
    """Wrong arguments are refused, and right ones are not."""
    wrong: tuple[tuple[Any, ...], ...] = ((1.0, 0), (-0.1, 0), (0.1, 0.5), (0.1, 2**64), (0.1, 0, -1), (0.1, 0, 2**32))
    for arguments in wrong:
        try:
            library.Dropout(*arguments)
        except library.UnsupportedProblem:
            continue
        raise AssertionError(f"{arguments} were taken")
    for place in (-1, 3):
        try:
            library.Dropout(0.5, 0).keep((3, 5), queries=np.array([place]))
        except library.UnsupportedProblem:
            continue
        raise AssertionError(f"row {place} was taken")
    library.Dropout(0, 2**64 - 1, 2**32 - 1)
    q = np.ones((2, 4, 5, 8), np.float32)
    ready = library.plan(q, q, q, dropout=library.Dropout(0.5, library.ShapeDtype((), np.int64)))
    try:
        ready.forward(q, q, q)
    except library.UnsupportedProblem:
        return
    raise AssertionError("the plan ran without its seed")


def calls_are_told_apart(library: ModuleType) -> None:
    """Calls that differ in their dropout alone are different calls."""
    q = np.random.default_rng(0).standard_normal((4, 20, 8), np.float32)
    dropouts = None, library.Dropout(0.5, 1), library.Dropout(0.5, 2), library.Dropout(0.5, 1, 1)
    found = {library.attention(q, q, q, dropout=dropout).tobytes() for _ in range(2) for dropout in dropouts}
    assert len(found) == 4


def calls_hand_over_their_numbers(library: ModuleType) -> None:
    """Kernels drop what the installed library's host function drops, for a threshold whose lowest bit is 0."""
    example = SHORT.example()
    part(library, "compiler.source").KERNELS = sources.KERNELS  # which no copy of the library has
    ours, theirs = library.Dropout(0.4, SEED, 5), example.but(dropout=Dropout(0.4, SEED, 5))
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, dropout=ours, executor="sim", kernel="simt", return_lse=True
    )
    found = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *vjp(example.do, example.dlse))))
    assert_within_bounds(theirs, **found)


def simt_is_right() -> None:
    """dQ is added up by the backward kernel, and made by a kernel of its own."""
    check_simulated("simt", SHORT)
    check_simulated("simt", SHORT, deterministic=True)


def naive_is_right() -> None:
    check_simulated("naive", SHORT)


def sm80_is_right() -> None:
    """dQ is added up or has its own kernel; there are several steps of keys, and keys that blocks share."""
    check_simulated("sm80", replace(HALF, q_batch=(), k_batch=(), v_batch=(), seqlen_kv=150))
    check_simulated("sm80", HALF, deterministic=True)
    check_simulated("sm80", replace(HALF, seqlen_q=3, seqlen_kv=400))


def sm90_is_right() -> None:
    """A warpgroup skips more steps than drawers are ahead."""
    sequences = Sequences(np.array([0, 86, 150]), np.array([0, 50, 700]))
    one = replace(HALF, q_batch=(), k_batch=(), v_batch=())
    check_simulated("sm90", replace(one, seqlen_q=150, seqlen_kv=700, mask=sequences))


def hopper_gradients_are_right() -> None:
    """Tiles have 128 queries and 64, and blocks of a list start anywhere."""
    check_simulated("sm90", replace(HALF, seqlen_q=70, seqlen_kv=140, head_dim=80))
    blocks = BlockPattern(np.array([[True, False], [True, True]]), (136, 152))
    check_simulated("sm90", replace(HALF, q_batch=(), k_batch=(), v_batch=(), seqlen_q=150, seqlen_kv=200, mask=blocks))
