"""Guards that must see the faults of the kernels of KV caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from cache_calls import NEW, appended, assert_is_attention, attended, drawn, expected, paged, same_bits
from cuflash import DeviceSpec, sim
from cuflash.executors.sim import Simulator
from executors import SIM

SIGNS = (AssertionError,)  # exceptions by which guards see a fault
_CALL = drawn(NEW | {"rows": 3, "heads": 4, "window": (130, None), "sink": True}, (193, 2, 70))
_HOSTILE = [Simulator(sim.Schedule(seed=1, order=order, copies="late")) for order in ("last_warp", "first_warp")]


def decode_is_right() -> None:
    """Results in pages are within bounds, with equal bits alone, for fewer rows, and if copies land late."""
    call = replace(_CALL, counts=(3, 3, 2))
    o, lse, faults = attended(SIM, call, paged(call, 16, 0))
    assert_is_attention(call, o, lse, SIM.rounded)
    assert not faults
    for target in _HOSTILE:
        assert same_bits(attended(SIM, call, target=target)[:2], (o, lse))
    alone = attended(SIM, call.of([0]))
    assert same_bits(alone[:2], (o[:1], lse[:1]))


def steps_use_stages_in_turn() -> None:
    """Parts of many steps are within bounds, with equal bits in two, three and four stages."""
    call, device = drawn(NEW, (700, 690, 641), 700), replace(DeviceSpec.gpu("H100"), num_processors=2)
    o, lse, _ = attended(SIM, call, device=device, target=_HOSTILE[0])
    assert_is_attention(call, o, lse, SIM.rounded)
    for rows in ([0], [1, 0]):
        assert same_bits(attended(SIM, call.of(rows), device=device)[:2], [x[rows] for x in (o, lse)])


def pages_out_of_range_are_counted() -> None:
    """Page numbers below 0 or beyond the last, and lengths beyond the capacity, read nothing and are counted."""
    k, v, table = paged(_CALL, 16, 0)
    for junk in (-1, len(k)):
        wrong = table.copy()
        wrong[0, 6] = junk
        o, lse, faults = attended(SIM, _CALL, (k, v, wrong))
        assert faults > 0 and np.isfinite(o.astype(np.float32)).all() and np.isfinite(lse).all()
    assert attended(SIM, replace(_CALL, lengths=(301, 2, 70)), (k, v, table * 0))[2] > 0


def append_is_right() -> None:
    """Rows go to their pages, whole or not, by one block a sequence and by several; rows without room are counted."""
    for dims, num_rows, counts in (((8, 3), 5, (5, 2, 0, 4)), ((256, 256), 26, (26, 10, 1, 4))):
        rows, k, v, lengths, faults = appended(SIM, np.float32, dims, counts, num_rows)
        pages, wanted = expected(rows, counts)
        assert np.array_equal(k, pages[0]) and np.array_equal(v, pages[1]) and lengths.tolist() == wanted
        assert not faults[0]
    for counts in ((0, 0, 0, 5), (0, 0, 3, 0)):  # beyond the capacity, and on a page that is none
        rows, k, _, lengths, faults = appended(SIM, np.float32, (8, 8), counts)
        pages, wanted = expected(rows, counts)
        assert faults[0] and np.array_equal(k, pages[0]) and lengths.tolist() == wanted
