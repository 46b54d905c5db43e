"""The record of what a KV cache of 8-bit numbers has beside its pages: an argument of its own of kernels that take it."""

from __future__ import annotations

import numpy as np

from .launches import MATRICES

CACHE_SCALES = np.dtype([(name, MATRICES) for name in ("k_scale", "v_scale")], align=True)
