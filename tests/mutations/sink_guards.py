"""Guards for faults of sinks: of the library's Python, which each guard takes, and of kernels on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from cuflash import masks
from cuflash.testing import Example, Structure, assert_within_bounds
from executors import SIM
from executors import check_simulated

import cuflash

SIGNS = (AssertionError, ValueError)  # exceptions by which guards see a fault
HEADS = {"num_heads": 4, "num_kv_heads": 2, "sink": (4,)}
TWO = {"q_batch": (2,), "k_batch": (2,), "v_batch": (2,)}
ROWS = np.arange(40)[:, None] % 3 > 0  # others have no key
SHORT = Structure(**HEADS, **TWO, seqlen_q=40, seqlen_kv=70, mask=masks.Dense(ROWS))
HALF = replace(SHORT, dtype="float16")
LISTED = Structure(
    **HEADS, seqlen_q=150, seqlen_kv=140, dtype="float16",
    mask=masks.BlockPattern(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool), (64, 64)),
)  # fmt: skip


def the_host_is_right(library: ModuleType) -> None:
    """Results of the copy are arrays within bounds; a sink of -inf changes nothing, and one of inf or NaN gives NaN."""
    for structure in (SHORT, replace(SHORT, seqlen_kv=0, mask=None), Structure(seqlen_q=5, seqlen_kv=9, sink=())):
        example = structure.example()
        found = _results(library, example)
        assert all(isinstance(result, np.ndarray) for result in found.values())
        assert_within_bounds(example, **found)
    example = SHORT.example()
    _assert_rows_without_keys_give_dlse(example, lambda changed: _results(library, changed))
    without = _results(library, example.but(sink=None))
    nothing = _results(library, example.but(sink=np.full(4, -np.inf, np.float32)))
    assert not nothing["dsink"].any()
    assert all(np.array_equal(nothing[name], result) for name, result in without.items())
    for structure in (SHORT, replace(SHORT, seqlen_kv=0, mask=None)):
        found = _results(library, structure.example().but(sink=np.array([0, np.inf, np.nan, 0], np.float32)))
        for name in ("o", "lse"):
            is_nan = np.isnan(found[name]).all(axis=(0, *range(2, found[name].ndim)))
            assert is_nan.tolist() == [False, True, True, False]


def bounds_are_sharp(library: ModuleType) -> None:
    """The bounds of the copy equal those of the installed library."""
    error_bound = import_module(f"{library.__name__}.bounds").error_bound
    example = SHORT.example()
    operands = example.q, example.k, example.v, example.do
    wide = np.array([1e4, -1e39, 0.1, 0])
    for sink, bias in ((example.sink, None), (wide, None), (wide, np.where(ROWS, -np.inf, 0.1))):
        options = {"dlse": example.dlse, "mask": example.dense_mask, "sink": sink, "bias": bias}
        found, expected = error_bound(*operands, **options), cuflash.error_bound(*operands, **options)
        for name in ("o", "lse", "dsink"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9)


def sinks_are_refused(library: ModuleType) -> None:
    """Wrong arguments are refused, and right ones are not."""
    q, sink = np.ones((2, 4, 5, 8), np.float32), np.zeros(4, np.float32)
    wrong = ({"sink": sink[:3]}, {"sink": sink.astype(int)}, {"wrt": "sink"})
    for options in (*wrong, {"sink": sink, "wrt": "q"}, {"sink": sink, "wrt": {"sink"}}):
        try:
            library.attention_vjp(q, q, q, **options)
        except library.UnsupportedProblem:
            continue
        raise AssertionError(f"{list(options)} were taken")
    ready = library.plan(q, q, q, sink=sink)
    for given in ({}, {"sink": sink, "bias": sink}):
        try:
            ready.forward(q, q, q, **given)
        except library.UnsupportedProblem:
            continue
        raise AssertionError(f"the plan took {list(given)}")
    library.attention(q, q, q, sink=np.zeros((2, 1), np.float16))
    for like in (q, q.astype(float)):
        library.attention(like, like, like, sink=sink.astype(float))
    overflows: list[Any] = []
    with np.errstate(over="call", call=lambda *error: overflows.append(error)):
        library.attention(q, q[:, :0], q[:, :0], sink=sink - 1e39)
    assert not overflows


def calls_are_told_apart(library: ModuleType) -> None:
    """Calls that differ in the sink alone, or in the gradients they have, are different calls."""
    q, sink = np.ones((4, 5, 8), np.float32), np.zeros(4, np.float32)
    plain, other = library.attention(q, q, q), library.attention(q, q, q, sink=sink)
    assert not np.array_equal(plain, other)
    for wrt in ((), "sink"):
        for _ in range(2):
            o, vjp = library.attention_vjp(q, q, q, sink=sink, wrt=wrt)
            assert set(vjp(o).others) == ({"sink"} if wrt else set())
    raised = library.attention(q, q, q, sink=sink + 1)
    assert not np.array_equal(raised, other)


def _assert_rows_without_keys_give_dlse(example: Example, results: Callable[[Example], Any]) -> None:
    """NaN in do of rows without keys reaches no sink; in another row it does, beside a sink of any size."""
    do = np.where(ROWS, example.do, np.nan).astype(example.do.dtype)
    assert_within_bounds(example, dsink=results(example.but(do=do))["dsink"])
    do[:, 1, 1] = np.nan
    for sink in (example.sink, np.full(4, 25, np.float32)):
        assert np.isnan(results(example.but(do=do, sink=sink))["dsink"]).tolist() == [False, True, False, False]


def _results(library: ModuleType, example: Any) -> dict[str, Any]:
    sink = {} if example.sink is None else {"sink": example.sink, "wrt": "sink"}
    (o, lse), vjp = library.attention_vjp(
        example.q, example.k, example.v, mask=example.dense_mask, scale=example.scale, return_lse=True, **sink
    )
    gradients = vjp(example.do, example.dlse)
    results = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients)))
    return results | {f"d{name}": gradient for name, gradient in gradients.others.items()}


def simt_is_right() -> None:
    check_simulated("simt", SHORT)
    check_simulated("simt", replace(SHORT, sink=(2, 1), sink_dtype="bfloat16"))
    check_simulated("simt", replace(SHORT, sink=(1,), sink_dtype="float16"))
    check_simulated("simt", replace(SHORT, sink_dtype="float64"))
    example = SHORT.example()
    run = replace(SIM, kernel="simt")
    _assert_rows_without_keys_give_dlse(example, run.everything)
    nothing = run.everything(example.but(sink=np.full(4, -np.inf, np.float32)))
    assert not nothing.pop("dsink").any()
    plain = run.everything(example.but(sink=None))
    assert all(np.array_equal(nothing[name], plain[name]) for name in ("o", "lse"))


def naive_is_right() -> None:
    check_simulated("naive", SHORT)


def sm80_is_right() -> None:
    """Results are right for whole tiles, and for keys that blocks share."""
    check_simulated("sm80", HALF)
    check_simulated("sm80", replace(HALF, seqlen_q=3, seqlen_kv=600, mask=None))


def sm90_is_right() -> None:
    """Results are right without a list, and with one that leaves some tiles without a key."""
    check_simulated("sm90", HALF)
    check_simulated("sm90", LISTED)
