"""Plans as users call them: they check arrays, allocate results, and pass both to an executor."""

from .plan import Gradients, Plan

__all__ = ["Gradients", "Plan"]
