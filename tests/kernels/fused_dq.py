"""The order in which thread blocks that finish dQ take tiles of keys, and context managers that patch plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import NamedTuple

import pytest
from cuflash.calls import _call
from cuflash.planning import plan_cache
from cuflash.planning.families import sm90, sm90_dq
from cuflash.planning.launches import DqSemaphoreOrder


class KeyTile(NamedTuple):
    place: int  # batch entry and head of the keys
    number: int  # index of the tile along the sequence


def finishing_order(dq_order: DqSemaphoreOrder, num_groups: int, num_tiles: int) -> list[KeyTile]:
    """Return the key tiles of the heads whose dQ the backward kernel finishes, in the order in which it visits them."""
    order = []
    for round_ in range(num_groups + dq_order.last_tile_lead + dq_order.first_tile_lag):
        for numbers, delay in (
            ([num_tiles - 1], 0),
            (range(num_tiles - 2, 0, -1), dq_order.last_tile_lead),
            ([0], dq_order.last_tile_lead + dq_order.first_tile_lag),
        ):
            if 0 <= round_ - delay < num_groups:
                first = (round_ - delay) * dq_order.heads_per_group
                order += [
                    KeyTile(first + place, number) for number in numbers for place in range(dq_order.heads_per_group)
                ]
    return order


@contextmanager
def plans_of_its_own() -> Iterator[None]:
    """Empty the plan cache before and after a `with` block, so that plans created under patches do not outlive it."""
    plan_cache._cached_plan.cache_clear()
    try:
        yield
    finally:
        plan_cache._cached_plan.cache_clear()


@contextmanager
def by_last(*, finishes: bool) -> Iterator[None]:
    """Make plans in which the last tile of keys to arrive always finishes dQ, or in which no tile finishes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90_dq, "_MOST_FINISHED_TILES", inf if finishes else -1)
        with plans_of_its_own():
            yield


@contextmanager
def cut_from(keys: float) -> Iterator[None]:
    """Make plans in which tiles end with their sequences if the mean sequence length is at least `keys`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "LONG_SEQUENCE", keys)
        with plans_of_its_own():
            yield


@contextmanager
def on_few_processors(number: int = 3, *, finishes: bool = True) -> Iterator[None]:
    """Make plans for a GPU with few multiprocessors, in which blocks finish dQ wherever they can, or never.

    On such a GPU, small calls have enough tiles for blocks to finish dQ.
    """
    device = _call._device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_call, "_device", lambda executor: replace(device(executor), num_processors=number))
        patch.setattr(sm90_dq, "_is_faster", lambda *_: finishes)
        with plans_of_its_own():
            yield
