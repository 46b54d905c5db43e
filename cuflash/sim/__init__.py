"""The simulator, which compiles CUDA kernels with g++ and runs them on simulated thread blocks, reproducibly."""

from .compiler import BuildError, Sanitizer, build, preload_environment
from .launch import Kernel, Schedule, SimulationError

__all__ = ["BuildError", "Kernel", "Sanitizer", "Schedule", "SimulationError", "build", "preload_environment"]
