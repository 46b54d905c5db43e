"""Exact attention for people who write NumPy: tiled, causal and block-sparse, forward and backward.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 256, 64), dtype=np.float32)
>>> cuflash.attention(q, k, v, causal=True).shape
(8, 256, 64)
"""

from typing import TYPE_CHECKING

from . import masks as masks, patterns as patterns, reference as reference, scores as scores, selectors as selectors
from .api import attention, attention_vjp, plan, precompile
from .arrays import ShapeDtype
from .blocks.index import BlockIndex
from .bounds import Bounds, error_bound
from .cache import KVCache
from .compiler.host_cache import cache_clear
from .compiler.nvrtc import cache_info
from .diagnosis import doctor, show_config
from .dropout import Dropout
from .errors import CompileError, UnsupportedProblem
from .fp8 import QuantizationBound, Quantized, Rotation, quantization_bound, quantize
from .merging import merge
from .packing import pack, unpack
from .planning.device import DeviceSpec
from .planning.peaks import Peaks
from .plans import Plan, Gradients
from .scores import Score
from .study.block_mass import block_mass
from .study.calculators import kv_cache_bytes, largest_length, memory
from .study.recall import Recall, recall
from .study.roofline import Roofline, roofline

__version__ = "0.1.0"

__all__ = [
    "BlockIndex",
    "Bounds",
    "CompileError",
    "DeviceSpec",
    "Dropout",
    "Gradients",
    "KVCache",
    "Peaks",
    "Plan",
    "QuantizationBound",
    "Quantized",
    "Recall",
    "Roofline",
    "Rotation",
    "Score",
    "ShapeDtype",
    "UnsupportedProblem",
    "attention",
    "attention_vjp",
    "block_mass",
    "cache_clear",
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
    "quantization_bound",
    "quantize",
    "recall",
    "reference",
    "roofline",
    "scores",
    "selectors",
    "show_config",
    "unpack",
]


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> object:
        if name in ("jax", "testing", "torch"):  # each needs a library that `import cuflash` leaves alone
            raise AttributeError(f"cuflash.{name} must be imported before it is used: write import cuflash.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
