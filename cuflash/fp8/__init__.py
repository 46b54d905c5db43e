"""FP8 (e4m3) operands: quantization in blocks, rotations that spread outliers, and bounds on the quantization error."""

from .quantization_error import QuantizationBound, quantization_bound
from .quantize import Quantized, quantize
from .rotation import Rotation

__all__ = ["QuantizationBound", "Quantized", "Rotation", "quantization_bound", "quantize"]
