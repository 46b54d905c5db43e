"""FP8 (e4m3) operands: quantization in blocks, and rotations that spread outliers."""

from .quantize import Quantized, quantize
from .rotation import Rotation

__all__ = ["Quantized", "Rotation", "quantize"]
