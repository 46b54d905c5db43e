"""Pictures of masks and block indices: as text, as SVG for notebooks, and with matplotlib.

A picture shows the states of one matrix of blocks: 0 absent, 1 full, 2 partial.
"""

from __future__ import annotations

from html import escape
from math import ceil
from typing import Any

import numpy as np

from ..arrays import Array, describe, is_int, to_host, whole_number
from ..errors import UnsupportedProblem, collecting, refuse
from .content import mask_namespace
from .coordinates import elements
from .shape import BlockSize, MaskShape, block_pair

SYMBOLS = "·█▒"  # the symbols of absent, full and partial blocks
COLOURS = ("#ffffff", "#1f4e79", "#9dc3e6")
MEANINGS = ("absent", "full", "partial")
_PIXELS = 256  # length of the longer side of an SVG
_CELLS = 64  # maximum number of cells along the longer side of an SVG


def shown_states(
    mask: Any, shape: MaskShape, block: BlockSize, b: int, h: int, *, most_cols: int, most_rows: int | None = None
) -> tuple[Array, tuple[int, int]]:
    """Return the states of one matrix of a mask, and their block size: a multiple of `block` within the size limits.

    Raises
    ------
    UnsupportedProblem
        The mask does not fit the shape, `block` is not a block size, or there is no such batch entry or head.
    """
    reasons: list[str] = []
    with collecting(reasons):
        block_q, block_kv = block_pair(block)
        cols = -(-shape.seqlen_kv // block_kv) / whole_number("width", most_cols, 1)
        rows = -(-shape.seqlen_q // block_q) / most_rows if most_rows else 0
        step = max(1, ceil(max(cols, rows)))
    reasons += place_reasons(b, h, shape.num_batch, shape.num_heads)
    refuse(reasons)
    coarse = block_q * step, block_kv * step
    return states_of(mask.resolve(shape), shape, coarse, b, h), coarse


def place_reasons(b: int, h: int, num_batch: int, num_heads: int) -> list[str]:
    """Return the reasons why a batch entry or a head is out of range."""
    return [
        f"{name} must be an int from 0 to {extent - 1}; got {describe(place)}"
        if extent
        else f"{name} needs an entry to show; got none"
        for name, place, extent in (("b", b, num_batch), ("h", h, num_heads))
        if not (is_int(place) and 0 <= place < extent)
    ]


def states_of(mask: Any, shape: MaskShape, block: tuple[int, int], b: int, h: int) -> Array:
    """Return the states of one matrix of a resolved mask, uint8 [num_q_blocks, num_kv_blocks]; wait for the device.

    Closed forms decide most blocks, and the elements at a block's four corners most others. All elements of the
    remaining blocks are evaluated, one row of blocks at a time.
    """
    xp, grid = mask_namespace(mask), tuple(-(-length // side) for length, side in zip(shape[2:], block))
    if 0 in grid:
        return np.zeros(grid, np.uint8)
    b, h = xp.asarray(b), xp.asarray(h)  # functions of a mask get arrays, also if they read only these
    (top, end), (left, right) = (
        (xp.arange(0, length, side), xp.minimum(xp.arange(0, length, side) + side, length))
        for length, side in zip(shape[2:], block)
    )

    def on_host(answer: Array) -> Array:
        return to_host(xp.broadcast_to(xp.asarray(answer), grid))

    may, must = map(on_host, mask.rectangle(b, h, top[:, None], end[:, None], left, right))
    corners = [on_host(elements(mask, b, h, i[:, None], j)) for i in (top, end - 1) for j in (left, right - 1)]
    some, every = np.logical_or.reduce(corners), np.logical_and.reduce(corners)
    states = np.where(must & may, 1, 2 * may).astype(np.uint8)
    undecided = (states == 2) & (some == every)
    for row in np.flatnonzero(undecided.any(1)).tolist():
        cols = np.flatnonzero(undecided[row])
        starts = np.arange(len(cols)) * block[1]  # only the last column of blocks may be short
        j = (cols[:, None] * block[1] + np.arange(block[1])).ravel()
        i = xp.arange(row * block[0], min((row + 1) * block[0], shape.seqlen_q))[:, None]
        j = j[j < shape.seqlen_kv]
        strip = to_host(xp.broadcast_to(xp.asarray(elements(mask, b, h, i, xp.asarray(j))), (len(i), len(j))))
        every_one = np.logical_and.reduceat(strip.all(0), starts)
        states[row, cols] = np.where(every_one, 1, 2 * np.logical_or.reduceat(strip.any(0), starts))
    return states


def coarser(states: Array, step: int) -> Array:
    """Return the states of groups of step by step blocks: absent or full if all blocks are, otherwise partial."""
    rows, cols = (np.arange(0, extent, step) for extent in states.shape)
    if step == 1 or not states.size:
        return states

    def of_groups(combine: np.ufunc, holds: Array) -> Array:
        return combine.reduceat(combine.reduceat(holds, rows, axis=0), cols, axis=1)

    some, every = of_groups(np.logical_or, states != 0), of_groups(np.logical_and, states == 1)
    return np.where(every, 1, np.where(some, 2, 0)).astype(np.uint8)


def as_text(states: Array) -> str:
    """Return one line of symbols per row of blocks."""
    return "\n".join("".join(SYMBOLS[state] for state in row) for row in states.tolist())


def as_html(mask: Any, own: tuple[int | None, int | None]) -> str:
    """Return a mask's repr and its picture at its own lengths, or at 32 tokens if it has none."""
    seqlen_q, seqlen_kv = (length or other or 32 for length, other in zip(own, own[::-1]))
    described = f"<pre>{escape(repr(mask))}</pre>"
    try:
        states, _ = shown_states(mask, MaskShape((), 1, seqlen_q, seqlen_kv), 1, 0, 0, most_cols=64, most_rows=64)
    except UnsupportedProblem:  # the mask needs an alignment, or depends on the batch or the head
        return described
    return f"{described}{as_svg(states)}<br>{seqlen_q} x {seqlen_kv} tokens"


def as_svg(states: Array) -> str:
    """Return an SVG image with one rectangle per run of equal states in a row."""
    states = coarser(states, max(1, -(-max(states.shape) // _CELLS)))
    num_rows, num_cols = states.shape
    side = _PIXELS / max(num_rows, num_cols, 1)
    rectangles = []
    for row, line in enumerate(states.tolist()):
        start = 0
        for col in range(1, num_cols + 1):
            if col == num_cols or line[col] != line[start]:
                if line[start]:
                    rectangles.append(
                        f'<rect x="{start}" y="{row}" width="{col - start}" height="1" fill="{COLOURS[line[start]]}"/>'
                    )
                start = col
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{num_cols * side:.0f}" height="{num_rows * side:.0f}" '
        f'viewBox="0 0 {num_cols} {num_rows}" preserveAspectRatio="none" shape-rendering="crispEdges" '
        f'style="border:1px solid #888;background:#fff">{"".join(rectangles)}</svg>'
    )


def plotted(states: Array, lengths: tuple[int, int], block: tuple[int, int], ax: Any) -> Any:
    """Plot states with matplotlib on axes whose unit is the token.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    try:
        from matplotlib import colors, patches, pyplot
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install matplotlib") from error
    if ax is None:
        ax = pyplot.subplots()[1]
    elif not hasattr(ax, "imshow"):
        raise UnsupportedProblem(f"ax must be the axes of a matplotlib figure; got {type(ax).__name__}")
    num_rows, num_cols = states.shape
    extent = (0, num_cols * block[1], num_rows * block[0], 0)
    ax.imshow(states, cmap=colors.ListedColormap(COLOURS), vmin=0, vmax=2, extent=extent, interpolation="nearest")
    ax.set(xlim=(0, lengths[1]), ylim=(lengths[0], 0), xlabel="key", ylabel="query")
    shown = [state for state in (1, 2) if (states == state).any()]
    if 2 in shown:
        ax.legend(
            handles=[patches.Patch(facecolor=COLOURS[state], label=MEANINGS[state]) for state in shown],
            loc="upper right",
        )
    return ax
