"""The order in which blocks take tiles of keys where they finish dQ, as a list; and what each tile waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
from cuflash import api
from cuflash.planning.families import sm90_dq
from cuflash.planning.launches import DqTurns


class KeyTile(NamedTuple):
    place: int  # a batch entry and head of keys
    number: int  # along the sequence


def finishing_order(turns: DqTurns, num_groups: int, num_tiles: int) -> list[KeyTile]:
    """Of groups that are finished, round after round."""
    found = []
    for round_ in range(num_groups + turns.ahead + turns.behind):
        for numbers, delay in (
            ([num_tiles - 1], 0),
            (range(num_tiles - 2, 0, -1), turns.ahead),
            ([0], turns.ahead + turns.behind),
        ):
            if 0 <= round_ - delay < num_groups:
                first = (round_ - delay) * turns.places
                found += [KeyTile(first + place, number) for number in numbers for place in range(turns.places)]
    return found


def taken_order(turns: DqTurns, num_places: int, num_tiles: int) -> list[KeyTile]:
    """The same, and then the tiles of other places: theirs of most steps first, as under a causal mask."""
    finished = turns.finished(num_places)
    order = finishing_order(turns, finished // turns.places, num_tiles) if finished else []
    for first in range(finished, num_places, turns.places):
        places = range(first, min(first + turns.places, num_places))
        order += [KeyTile(place, number) for number in range(num_tiles) for place in places]
    return order


@contextmanager
def of_lists(*, finishes: bool) -> Iterator[None]:
    """As if it always paid that the last tile of keys to come to queries of a list finishes their dQ, or never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90_dq, "_VISITS_THAT_PAY", 1 << 30 if finishes else 0)
        api._remembered.cache_clear()
        yield
    api._remembered.cache_clear()


@contextmanager
def on_few_processors(number: int = 3, *, finishes: bool = True) -> Iterator[None]:
    """As if a GPU had few multiprocessors, so that small calls have tiles enough for blocks to finish dQ; and as if
    that always paid, or never."""
    device = api._device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_device", lambda executor: replace(device(executor), num_processors=number))
        patch.setattr(sm90_dq, "_pays", lambda *_: finishes)
        api._remembered.cache_clear()
        yield
    api._remembered.cache_clear()
