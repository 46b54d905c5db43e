"""Operands of 8 bits: quantisation in blocks, rotations that spread outliers, and what both cost."""

from .quantization_error import QuantizationBound, quantization_bound
from .quantize import Quantized, quantize
from .rotation import Rotation

__all__ = ["QuantizationBound", "Quantized", "Rotation", "quantization_bound", "quantize"]
