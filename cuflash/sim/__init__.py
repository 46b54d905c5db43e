"""CUDA kernels on the host: the same text, compiled by g++, run on a simulated thread block, checked and repeatable."""

from .compiler import BuildError, Sanitizer, build, preload_environment
from .launch import Kernel, Schedule, SimulationError

__all__ = ["BuildError", "Kernel", "Sanitizer", "Schedule", "SimulationError", "build", "preload_environment"]
