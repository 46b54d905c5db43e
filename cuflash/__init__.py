"""Exact attention for people who write NumPy: tiled, causal and block-sparse, forward and backward.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 256, 64), dtype=np.float32)
>>> cuflash.attention(q, k, v, causal=True).shape
(8, 256, 64)
"""

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # where each public name comes from; at run time `__getattr__` imports its module at the first use
    from . import masks as masks, patterns as patterns, reference as reference, scores as scores, selectors as selectors
    from .api import attention, attention_vjp, plan, precompile
    from .arrays import ShapeDtype
    from .blocks.index import BlockIndex
    from .bounds import Bounds, error_bound
    from .bounds.quantization import QuantizationBound, quantization_bound
    from .cache import KVCache
    from .compiler.host_cache import cache_clear
    from .compiler.nvrtc import cache_info
    from .diagnosis import doctor, show_config
    from .dropout import Dropout
    from .errors import CompileError, UnsupportedProblem
    from .fp8 import Rotation
    from .fp8.quantize import Quantized, quantize
    from .merging import merge, merge_vjp
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
    "merge_vjp",
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

# The import statements above as a table. A BlockIndex comes with the executors, whose kernels make indices on a GPU.
_MODULES = {
    "api": ("attention", "attention_vjp", "plan", "precompile"),
    "arrays": ("ShapeDtype",),
    "bounds": ("Bounds", "error_bound"),
    "bounds.quantization": ("QuantizationBound", "quantization_bound"),
    "cache": ("KVCache",),
    "compiler.host_cache": ("cache_clear",),
    "compiler.nvrtc": ("cache_info",),
    "diagnosis": ("doctor", "show_config"),
    "dropout": ("Dropout",),
    "errors": ("CompileError", "UnsupportedProblem"),
    "executors.index_maker": ("BlockIndex",),
    "fp8": ("Rotation",),
    "fp8.quantize": ("Quantized", "quantize"),
    "masks": ("masks",),
    "merging": ("merge", "merge_vjp"),
    "packing": ("pack", "unpack"),
    "patterns": ("patterns",),
    "planning.device": ("DeviceSpec",),
    "planning.peaks": ("Peaks",),
    "plans": ("Plan", "Gradients"),
    "reference": ("reference",),
    "scores": ("scores", "Score"),
    "selectors": ("selectors",),
    "study.block_mass": ("block_mass",),
    "study.calculators": ("kv_cache_bytes", "largest_length", "memory"),
    "study.recall": ("Recall", "recall"),
    "study.roofline": ("Roofline", "roofline"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_one_import = RLock()  # threads that import modules of one package side by side may find one half imported


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> object:
        if name in ("jax", "testing", "torch"):  # each needs a library that `import cuflash` leaves alone
            raise AttributeError(f"cuflash.{name} must be imported before it is used: write import cuflash.{name}")
        if name in _MODULE_OF:
            with _one_import:
                module = import_module(f".{_MODULE_OF[name]}", __name__)
            value = globals()[name] = module if _MODULE_OF[name] == name else getattr(module, name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
