"""The simulator: runs the same CUDA source, compiled by g++, on simulated thread blocks, checked and reproducible."""

from .compiler import BuildError, Sanitizer, build, preload_environment
from .launch import Kernel, Schedule, SimulationError

__all__ = ["BuildError", "Kernel", "Sanitizer", "Schedule", "SimulationError", "build", "preload_environment"]
