"""What must see the faults of how block lists are kept between calls and made on a device."""

from __future__ import annotations

import copy
import gc
import weakref
from types import ModuleType

import numpy as np

SIGNS = (AssertionError, ValueError)
Q = np.random.default_rng(0).standard_normal((2, 20, 8))


def index_of(library: ModuleType, step: int):
    return library.BlockIndex.from_mask(library.masks.Dilated(step), 20, 20, 4)


def a_kept_index_goes_by_itself(library: ModuleType) -> None:
    """An index that calls were made with is gone once it is not used any more, without Python's collector."""
    gc.collect()
    gc.disable()
    try:
        index = index_of(library, 3)
        for _ in range(2):
            library.attention(Q, Q, Q, mask=index)
        library.plan(Q, Q, Q, mask=index).forward(Q, Q, Q)
        held = [weakref.ref(index), weakref.ref(index.remembered.mask)]
        del index
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def an_index_is_read_once_and_never_changes(library: ModuleType) -> None:
    """Each index has calls and lists of its own, which are made once, and arrays that nobody writes to."""
    one, other = index_of(library, 3), index_of(library, 5)
    for _ in range(2):
        for index in (one, other):
            expected = library.attention(Q, Q, Q, mask=index.toarray()[0, 0])
            assert np.allclose(library.attention(Q, Q, Q, mask=index), expected)
    plans = [library.plan(Q[:count], Q[:count], Q[:count], mask=one) for count in (1, 2)]
    assert plans[0].plan.work is plans[1].plan.work
    for index in (one, copy.deepcopy(one)):
        assert not any(getattr(index, name).flags.writeable for name in ("indptr", "kinds", "bits"))
