"""How kernels read masks whose arrays are on a device: each call hands over the arrays, and nothing waits for them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from ..arrays import Array


class DeviceForm(NamedTuple):
    """A mask that kernels read at each call: its arrays, and whatever else it holds.

    Attributes
    ----------
    arrays : tuple of arrays
        In the order in which kernels take them.
    facts : tuple of hashable
        Masks of one class whose facts are equal, and whose arrays have equal layouts, differ in contents alone.
    """

    arrays: tuple[Array, ...]
    facts: tuple[Hashable, ...] = ()


class IntervalForm(NamedTuple):
    """Row intervals as a function of integers on a device, which a kernel evaluates.

    Attributes
    ----------
    kind : {"sequences", "lengths", "documents"}
        The function, as kernels_cu/lists/interval_params.cuh defines it.
    q : int array [*batch, n], or int
        The integers of the queries; an int if the host knows one length for all of them.
    kv : int array [*batch, n], int, or None
        Those of the keys; None if they are those of the queries.
    left, right : int or None
        Keys on either side of the diagonal of a sequence; None is unlimited.
    is_bottom_right : bool
        The diagonal ends with each sequence; otherwise it starts with it.
    """

    kind: Literal["sequences", "lengths", "documents"]
    q: Array | int
    kv: Array | int | None
    left: int | None = None
    right: int | None = None
    is_bottom_right: bool = False
