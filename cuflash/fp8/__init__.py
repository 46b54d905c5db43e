"""Operands of 8 bits: quantisation in blocks, and rotations that spread outliers."""

from .quantize import Quantized, quantize
from .rotation import Rotation

__all__ = ["Quantized", "Rotation", "quantize"]
