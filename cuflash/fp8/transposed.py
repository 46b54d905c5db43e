"""Values as tensor cores read them in 8 bits: transposed, in the order in which kernels hold weights."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, namespace

_PADDING = 128  # keys that transposed values are rounded up to


def transposed_values(data: Array) -> Array:
    """Values [..., keys, columns] as bytes [..., columns, keys], in the order in which kernels hold weights.

    Of 16 keys, thread t of four holds 2t, 2t + 1, 2t + 8 and 2t + 9. Keys are rounded up to a multiple of 128 by zeros.
    """
    xp = namespace(data)
    *leading, keys, columns = data.shape
    padded = xp.zeros((*leading, keys + -keys % _PADDING, columns), np.uint8)
    padded[..., :keys, :] = data.view(np.uint8)
    groups = padded.shape[-2] // 16
    parts = padded.reshape(*leading, groups, 2, 4, 2, columns)  # groups of 16, halves, threads, neighbours
    axes = len(leading)
    order = (*range(axes), axes + 4, axes, axes + 2, axes + 1, axes + 3)
    return xp.ascontiguousarray(parts.transpose(order)).reshape(*leading, columns, padded.shape[-2])
