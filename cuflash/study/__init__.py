"""Studies and calculators: the softmax mass that a mask keeps, the time and memory of a call, and error bounds.

Nothing here is needed to compute attention.

>>> import numpy as np
>>> from cuflash import masks, study
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 64, 16))
>>> bool(study.recall(q, k, v, mask=masks.Causal()).mass.mean() < 1)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..bounds import Bounds
from ..bounds.quantization import QuantizationBound, quantization_bound
from ..planning.peaks import Peaks
from ._masses import block_mass
from ._recall import Recall, recall
from ._roofline import Roofline, roofline
from .calculators import Memory, kv_cache_bytes, largest_length, memory

if TYPE_CHECKING:
    from .command import study_report as study_report

__all__ = [
    "Bounds",
    "Memory",
    "Peaks",
    "QuantizationBound",
    "Recall",
    "Roofline",
    "block_mass",
    "kv_cache_bytes",
    "largest_length",
    "memory",
    "quantization_bound",
    "recall",
    "roofline",
    "study_report",
]


def __getattr__(name: str) -> Any:
    """Import the command on first use, because the library itself does not need it."""
    if name == "study_report":
        from .command import study_report

        return study_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
