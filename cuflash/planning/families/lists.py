"""Kernels that list the blocks of a mask on the device: ``kernels_cu/lists/``."""

from __future__ import annotations


class Lists:
    """The family of the kernels that make lists; ``kernel=`` cannot name it."""

    name = "lists"
    waits_at_barriers = False

    def architecture(self, capability: tuple[int, int]) -> str:
        """NVRTC's name of the machine code for a compute capability."""
        return f"sm_{capability[0]}{capability[1]}"
