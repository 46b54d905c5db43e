"""The compiler: from kernel specifications to CUDA source text and machine code."""
