"""The compiler, which turns kernel specifications into CUDA source text and machine code."""
