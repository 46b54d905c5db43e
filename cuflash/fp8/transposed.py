"""FP8 values in the layout that tensor cores read: transposed, with keys in the register order of the weights."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, namespace

_PADDING = 128  # the number of keys of transposed values is a multiple of this


def transposed_values(data: Array) -> Array:
    """Transpose values [..., keys, columns] to bytes [..., columns, keys], with keys in the order of kernels' weights.

    Among 16 keys, thread t of four holds the weights of keys 2t, 2t + 1, 2t + 8 and 2t + 9, so that these follow each
    other. The keys are padded with zeros to a multiple of 128.
    """
    xp = namespace(data)
    *leading, keys, columns = data.shape
    padded = xp.zeros((*leading, keys + -keys % _PADDING, columns), np.uint8)
    padded[..., :keys, :] = data.view(np.uint8)
    groups = padded.shape[-2] // 16
    parts = padded.reshape(*leading, groups, 2, 4, 2, columns)  # axes: groups of 16 keys, halves, threads, pairs
    axes = len(leading)
    order = (*range(axes), axes + 4, axes, axes + 2, axes + 1, axes + 3)
    return xp.ascontiguousarray(parts.transpose(order)).reshape(*leading, columns, padded.shape[-2])
