"""Tiles aligned to packed sequences, numbered so that a kernel can compute their positions.

Rows are divided into sequences; rows before the first sequence and rows after the last also count as sequences.
Sequence n starts at row s[n], and its first tile has the number s[n] // height + n. So length // height tiles, plus one
per sequence, are enough; the last tiles of a sequence may be empty. The tile of row i has a number between i // height
and i // height plus the number of sequences. `kernels_cu/lists/intervals.cu` does the same with offsets on a device.
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array


def num_tiles(length: int, height: int, num_sequences: int) -> int:
    """Return the number of tiles along one axis of a matrix.

    >>> num_tiles(300, 64, 2)
    6
    """
    return length // height + num_sequences


def tile_starts(bounds: Array, height: int) -> Array:
    """Return the first row of each tile, followed by the length, int32 [matrices, tiles + 1].

    Parameters
    ----------
    bounds : int array [matrices, sequences + 1]
        The first row of each sequence, followed by the length. They start with 0 and never decrease.
    height : int
        Maximum number of rows per tile.

    >>> import numpy as np
    >>> tile_starts(np.array([[0, 100, 300]]), 64).tolist()
    [[0, 64, 100, 164, 228, 292, 300]]
    """
    bounds = np.asarray(bounds, np.int64)
    sequences = bounds.shape[1] - 1
    numbers = np.arange(num_tiles(int(bounds[0, -1]), height, sequences))
    rows = []
    for of_matrix in bounds:
        first_number = of_matrix[:-1] // height + np.arange(sequences)
        sequence = np.searchsorted(first_number, numbers, side="right") - 1
        starts = of_matrix[sequence] + height * (numbers - first_number[sequence])
        rows.append([*np.minimum(starts, of_matrix[sequence + 1]), of_matrix[-1]])
    return np.array(rows, np.int32)


def sequence_bounds(lo: Array, seqlen_kv: int) -> tuple[Array, Array]:
    """Find the bounds of the queries and keys of sequences, as arguments of `tile_starts`, from the first keys of rows.

    At the start of a sequence the first key of the row increases by more than one; in a sliding window it increases by
    one.

    Parameters
    ----------
    lo : int array [matrices, seqlen_q]
        The first key that each query attends to.

    >>> import numpy as np
    >>> queries, keys = sequence_bounds(np.array([[0, 0, 4, 4, 4]]), 9)
    >>> queries.tolist(), keys.tolist()
    ([[0, 2, 5]], [[0, 4, 9]])
    """
    seqlen_q = lo.shape[1]
    rows = [np.flatnonzero(np.diff(of_matrix) > 1) + 1 for of_matrix in lo]
    most = max(map(len, rows), default=0)

    def padded(firsts: Array, length: int) -> list[int]:
        return [0, *firsts.tolist(), *[length] * (most + 1 - len(firsts))]

    queries = [padded(of_matrix, seqlen_q) for of_matrix in rows]
    keys = [padded(of_lo[of_matrix], seqlen_kv) for of_lo, of_matrix in zip(lo, rows)]
    return np.array(queries), np.array(keys)
