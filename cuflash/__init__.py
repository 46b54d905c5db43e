"""Exact attention for people who write NumPy: tiled, causal and block-sparse, forward and backward.

>>> import numpy as np, cuflash
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 256, 64), dtype=np.float32)
>>> cuflash.attention(q, k, v, causal=True).shape
(8, 256, 64)
"""

import sys
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the module of each public name; at run time `__getattr__` imports it at first use
    from . import masks as masks, patterns as patterns, reference as reference, scores as scores
    from . import selectors as selectors, study as study
    from .api import attention as attention, attention_hvp as attention_hvp, attention_jvp as attention_jvp
    from .api import attention_vjp as attention_vjp, plan as plan, precompile as precompile
    from .arrays import ShapeDtype as ShapeDtype
    from .blocks.index import BlockIndex as BlockIndex
    from .bounds import error_bound as error_bound
    from .cache import KVCache as KVCache
    from .compiler.host_cache import cache_clear as cache_clear
    from .compiler.nvrtc import cache_info as cache_info
    from .dropout import Dropout as Dropout
    from .errors import UnsupportedProblem as UnsupportedProblem
    from .fp8 import Rotation as Rotation
    from .fp8.quantize import Quantized as Quantized, quantize as quantize
    from .merging import merge as merge, merge_vjp as merge_vjp
    from .packing import pack as pack, unpack as unpack
    from .planning.device import DeviceSpec as DeviceSpec
    from .plans import Gradients as Gradients, Plan as Plan

    __version__: str

if not getattr(sys, "_is_gil_enabled", lambda: True)():  # the call caches need the GIL; no test has run without it
    raise ImportError("cuflash needs the global interpreter lock, which is disabled: set PYTHON_GIL=1")

# The import statements above as a table. BlockIndex comes with the executors, whose kernels build indices on a GPU.
_MODULES = {
    "api": ("attention", "attention_hvp", "attention_jvp", "attention_vjp", "plan", "precompile"),
    "arrays": ("ShapeDtype",),
    "bounds": ("error_bound",),
    "cache": ("KVCache",),
    "compiler.host_cache": ("cache_clear",),
    "compiler.nvrtc": ("cache_info",),
    "dropout": ("Dropout",),
    "errors": ("UnsupportedProblem",),
    "executors.index_maker": ("BlockIndex",),
    "fp8": ("Rotation",),
    "fp8.quantize": ("Quantized", "quantize"),
    "masks": ("masks",),
    "merging": ("merge", "merge_vjp"),
    "packing": ("pack", "unpack"),
    "patterns": ("patterns",),
    "planning.device": ("DeviceSpec",),
    "plans": ("Plan", "Gradients"),
    "reference": ("reference",),
    "scores": ("scores",),
    "selectors": ("selectors",),
    "study": ("study",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_one_import = RLock()  # threads that import modules of one package concurrently may see a partly imported one

if not TYPE_CHECKING:  # otherwise a type checker would accept every name
    __all__ = sorted(_MODULE_OF)

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib import metadata

            try:
                return metadata.version("cuflash")
            except metadata.PackageNotFoundError:  # a source tree that is not installed
                return "0+unknown"
        if name in ("diagnosis", "distributed", "errors", "jax", "testing", "torch"):  # few programs need these
            raise AttributeError(f"cuflash.{name} must be imported before it is used: write import cuflash.{name}")
        if name in _MODULE_OF:
            with _one_import:
                module = import_module(f".{_MODULE_OF[name]}", __name__)
            value = globals()[name] = module if _MODULE_OF[name] == name else getattr(module, name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])
