"""One kernel with its records, complete but for the addresses that change from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..arrays import Array
from ..planning.launches import Launch
from . import checks
from .arguments import Arguments, Place
from .launch import LaunchTarget


class BoundLaunch:
    """A launch that needs nothing but the addresses of some arrays.

    Parameters
    ----------
    launch : Launch
    grid : int
        Thread blocks.
    records : sequence of records
        The kernel's arguments, complete for arrays of one layout. Each is a multiple of 8 bytes long.
    places : sequence of (int, int)
        The number of a record and the offset in bytes of an address in it, for each address that a call gives.
    target : LaunchTarget
        Where the arrays are.
    """

    def __init__(
        self, launch: Launch, grid: int, records: Sequence[Any], places: Sequence[tuple[int, int]], target: LaunchTarget
    ) -> None:
        ends = list(accumulate((record.dtype.itemsize // 8 for record in records), initial=0))
        words = np.concatenate([record.reshape(1).view(np.uint64) for record in records])
        at = (ends[number] + offset // 8 for number, offset in places)
        self._arguments = Arguments(
            words,
            [[slice(*pair) for pair in pairwise(ends)]],
            [Place(word, 0, number) for number, word in enumerate(at)],
        )
        self._start = target.launcher(launch.spec, grid, launch.shared_bytes)

    def __call__(self, addresses: Sequence[int], stream: Any) -> None:
        """Launch the kernel on a stream, for arrays at these addresses in the order of the places."""
        buffer = self._arguments.take(addresses)
        self._start(buffer.kernels[0], stream)
        self._arguments.give_back(buffer)


def launch_once(
    bind: Callable[[Any, Mapping[str, Array | None], tuple[str, ...], LaunchTarget], Callable[..., None]],
    plan: Any,
    arrays: Mapping[str, Array | None],
    target: LaunchTarget,
) -> list[Array]:
    """Launch a plan's kernels on arrays, with new workspaces.

    Parameters
    ----------
    bind : callable (plan, arrays, names, target)
        Binds the launches to arrays, complete but for the addresses of those that are named.
    plan : AppendPlan, DecodePlan or PrefillPlan
    arrays : dict by name
        As `bind` takes them, the workspaces left out.
    target : LaunchTarget
        Where the arrays are.

    Returns
    -------
    list of arrays
        The workspaces, in the plan's order, which the kernels may still use.
    """
    stream = target.stream()
    made = target.allocator(plan.workspaces)(stream)
    bind(plan, {**arrays, **dict(zip(plan.workspaces, made))}, (), target)((), stream)
    if checks.is_on():
        target.wait(plan.launch)
    return made
