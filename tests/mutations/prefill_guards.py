"""Guards for faults of the kernels that attend from many new tokens to a KV cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cache_calls import assert_is_attention, drawn, paged, same_bits
from executors import SIM
from prefill_calls import CHUNK, prefilled, with_counts

SIGNS = (AssertionError,)  # exceptions by which guards see a fault
_COUNTS = (70, 68)
_CALL = drawn(CHUNK | {"window": (70, None), "sink": True}, (193, 65))


def sm80_prefill_is_right() -> None:
    _is_right("sm80")


def sm90_prefill_is_right() -> None:
    _is_right("sm90")
    call = with_counts().of([0])
    o, lse, _ = prefilled(SIM, "sm90", call)
    one = replace(call, q=call.q[:, :, :133], counts=None)
    assert same_bits(prefilled(SIM, "sm90", one)[:2], (o[:, :, :133], lse[:, :, :133]))


def _is_right(family: str) -> None:
    """Results in pages are within bounds, numbers out of range are counted, and rows of no sequence are empty."""
    k, v, table = paged(_CALL, 16, 0)
    call = replace(_CALL, counts=_COUNTS)
    o, lse, faults = prefilled(SIM, family, call, (k, v, table))
    assert_is_attention(call, o, lse, SIM.rounded)
    empty = [0, 1, 2, 68, 69]  # before the first position, and of no sequence
    assert not faults
    assert np.array_equal(lse[1][:, empty], np.broadcast_to(call.sink[:, None], (2, len(empty))))
    for junk in (-1, len(k)):
        wrong = table.copy()
        wrong[0, 6] = junk
        o, lse, faults = prefilled(SIM, family, call, (k, v, wrong))
        assert faults > 0 and np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    assert prefilled(SIM, family, replace(call, lengths=(301, 65)), (k, v, table * 0))[2] > 0
