"""Kernels that list the blocks of a mask on the device: ``kernels_cu/lists/``."""

from __future__ import annotations


class Lists:
    """What is asked of a kernel's family, of kernels that are none of attention: ``kernel=`` cannot name them."""

    name = "lists"
    waits_at_barriers = False

    def architecture(self, capability: tuple[int, int]) -> str:
        """NVRTC's name of the machine code for a compute capability."""
        return f"sm_{capability[0]}{capability[1]}"
