"""Exact attention for people who write NumPy: tiled, causal and block-sparse, forward and backward.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 256, 64), dtype=np.float32)
>>> cuflash.attention(q, k, v, causal=True).shape
(8, 256, 64)
"""

from . import masks as masks, patterns as patterns, reference as reference, scores as scores
from .api import attention, attention_vjp, plan, precompile
from .arrays import ShapeDtype
from .blocks.index import BlockIndex
from .bounds import Bounds, error_bound
from .cache import KVCache
from .calculators import kv_cache_bytes, largest_length, memory
from .compiler.nvrtc import cache_info
from .doctor import doctor
from .dropout import Dropout
from .errors import CompileError, UnsupportedProblem
from .merging import merge
from .packing import pack, unpack
from .planning.device import DeviceSpec
from .plans import Executable, Gradients
from .scores import Score
from .study.recall import Recall, recall

__version__ = "0.1.0"

__all__ = [
    "BlockIndex",
    "Bounds",
    "CompileError",
    "DeviceSpec",
    "Dropout",
    "Executable",
    "Gradients",
    "KVCache",
    "Recall",
    "Score",
    "ShapeDtype",
    "UnsupportedProblem",
    "attention",
    "attention_vjp",
    "cache_info",
    "doctor",
    "error_bound",
    "kv_cache_bytes",
    "largest_length",
    "masks",
    "memory",
    "merge",
    "pack",
    "patterns",
    "plan",
    "precompile",
    "recall",
    "reference",
    "scores",
    "unpack",
]
