"""Scales of a KV cache of 8-bit numbers: a record that kernels take as an argument of its own."""

from __future__ import annotations

import numpy as np

from .launches import MATRICES

CACHE_SCALES = np.dtype([(name, MATRICES) for name in ("k_scale", "v_scale")], align=True)
