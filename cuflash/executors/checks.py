"""Checks of CUFLASH_CHECK=1: of work lists before a launch, and of its end, margins and results after it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import Array, Namespace, to_host
from ..blocks.classify import BlockKind
from ..blocks.work_list import IntervalWork, ListedWork, WorkList
from ..planning.launches import Workspace
from ..planning.routing import family_of
from ..planning.spec import KernelSpec

MARGIN = 4096  # bytes of the margins before and after a result
_PATTERN = 0xA5


_NAME: Any = "CUFLASH_CHECK" if os.name == "nt" else b"CUFLASH_CHECK"
_OFF = (None, "", "0", b"", b"0")


def is_on() -> bool:
    """True if CUFLASH_CHECK is set in the environment, and not to 0.

    This reads the dictionary inside `os.environ`, because `os.environ.get` raises and catches an error for a missing
    name, which takes 1 µs per call.
    """
    return os.environ._data.get(_NAME) not in _OFF  # type: ignore[attr-defined]


def with_watchdog(spec: KernelSpec) -> KernelSpec:
    """Return the specification to compile for a GPU: with a watchdog if checks are on and the kernel could hang."""
    return replace(spec, has_watchdog=True) if is_on() and family_of(spec).waits_at_barriers else spec


class _Margins(NamedTuple):
    name: str
    buffer: Array  # bytes
    nbytes: int  # size of the array between the margins


class Check:
    """The checks of one call.

    Parameters
    ----------
    inputs : dict of arrays by name
        Arrays that the call reads. If all their elements are finite, NaN in a result is an error.
    """

    def __init__(self, xp: Namespace, inputs: Mapping[str, Array]) -> None:
        self._xp = xp
        self._margins: list[_Margins] = []
        self._is_finite = all(bool(xp.isfinite(array).all()) for array in inputs.values())

    def empty(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new array with margins on both sides."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._xp.full(nbytes + 2 * MARGIN, _PATTERN, np.uint8)
        self._margins.append(_Margins(name, buffer, nbytes))
        return buffer[MARGIN : MARGIN + nbytes].view(dtype).reshape(shape)

    def workspace(self, name: str, workspace: Workspace) -> Array:
        """Return a new workspace with margins on both sides."""
        array = self.empty(name, workspace.shape, workspace.dtype)
        if workspace.is_zeroed:
            array.fill(0)
        return array

    def after(self, kernel: str, written: Mapping[str, Array]) -> None:
        """Check that margins are unchanged, and that results have no NaN if all inputs are finite.

        Raises
        ------
        RuntimeError
            A check failed; the message names the kernel and the array.
        """
        for name, buffer, nbytes in self._margins:
            for side, part in (("before", buffer[:MARGIN]), ("after", buffer[MARGIN + nbytes :])):
                wrong = part != _PATTERN
                if bool(wrong.any()):
                    position = int(np.flatnonzero(to_host(wrong))[0])
                    distance = MARGIN - position if side == "before" else position
                    raise RuntimeError(f"{kernel} wrote outside {name}: {distance} bytes {side} its memory")
        for name, array in written.items() if self._is_finite else ():
            wrong = array != array
            if bool(wrong.any()):
                first = [int(side[0]) for side in np.nonzero(to_host(wrong))]
                raise RuntimeError(f"{kernel} wrote NaN to {name}{first}, and all its inputs are finite")


def check_lists(work: WorkList, lists: Mapping[str, Array]) -> None:
    """Check that the indices in lists, which kernels follow unchecked, stay within their arrays.

    Raises
    ------
    RuntimeError
        A check failed; the message names the list and its first wrong position.
    """
    host = {name: to_host(array) for name, array in lists.items()}
    if isinstance(work, ListedWork):
        for name, side in host.items():
            _check_list(work, name, side, host)
    if "lo" in host:
        length = work.index.seqlen_kv if isinstance(work, ListedWork) else work.seqlen_kv
        for name in ("lo", "hi"):
            _in_range(name, host[name], 0, length + 1)
            _require(name, np.diff(host[name], axis=-1) >= 0, "never decrease along the rows")
    if isinstance(work, IntervalWork) and work.sequence_tile is not None and "q_blocks" in host:
        for name, end, height in zip(("q_blocks", "kv_blocks"), (work.seqlen_q, work.seqlen_kv), work.sequence_tile):
            sizes = np.diff(host[name], axis=-1)
            _require(name, (sizes >= 0) & (sizes <= height), f"delimit tiles of 0..{height} rows")
            _require(name, host[name][..., [0, -1]] == [0, end], f"start with 0 and end with {end}")
        order, numbers = np.sort(host["column_entries"], axis=-1), np.arange(work.num_sequence_tiles[1])
        _require("column_entries", order == numbers, f"hold each of 0..{len(numbers) - 1} once per matrix")


def _check_list(work: ListedWork, name: str, side: Array, lists: Mapping[str, Array]) -> None:
    index = work.index
    matrices, entries = index.batch * index.num_heads, int(lists["row_pointers"].ravel()[-1])
    if name in ("row_pointers", "column_pointers"):
        blocks = index.num_q_blocks if name == "row_pointers" else index.num_kv_blocks
        _require(name, np.array(side.size == matrices * blocks + 1), f"have {matrices * blocks + 1} elements")
        _require(name, side[:1] == 0, "start at 0")
        _require(name, np.diff(side) >= 0, "never decrease")
        _in_range(name, side, 0, min(entries, len(lists["kinds"])) + 1)
    elif name in ("row_order", "column_order"):
        blocks = index.num_q_blocks if name == "row_order" else index.num_kv_blocks
        _require(name, np.array(side.size == matrices * blocks), f"have {matrices * blocks} elements")
        numbers = np.sort(side.reshape(matrices, blocks), axis=1)
        _require(name, numbers == np.arange(blocks), f"hold each of 0..{blocks - 1} once per matrix")
    side = side[:entries]
    if name in ("kv_blocks", "q_blocks"):
        _in_range(name, side, 0, index.num_kv_blocks if name == "kv_blocks" else index.num_q_blocks)
    elif name == "column_entries":
        _in_range(name, side, 0, entries)
    elif name == "column_steps":
        order = lists["column_entries"][:entries]
        expected = 4 * lists["q_blocks"][order] + lists["kinds"][order]
        _require(name, side == expected, "be 4 * q_block + kind of the entry that column_entries names")
    elif name == "kinds":
        _require(
            name, np.isin(side, [int(kind) for kind in BlockKind]), f"be one of {[int(kind) for kind in BlockKind]}"
        )
    elif name == "tiles":
        are_bits = lists["kinds"][:entries] == BlockKind.BITS
        _require(name, ~are_bits | (side >= 0) & (side < len(lists["bits"])), f"be in 0..{len(lists['bits']) - 1}")


def _in_range(name: str, values: Array, start: int, stop: int) -> None:
    _require(name, (values >= start) & (values < stop), f"be in {start}..{stop - 1}")


def _require(name: str, holds: Array, rule: str) -> None:
    if not holds.all():
        position = [int(side[0]) for side in np.nonzero(~np.atleast_1d(holds))]
        raise RuntimeError(f"the work list's {name}, invalid at {position}, must {rule}")
