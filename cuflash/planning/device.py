"""Specifications of the devices that plans are made for; a GPU need not be present."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..arrays import describe, is_int
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords

# Maximum shared memory of a thread block in KiB, by compute capability.
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_SHARED_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}

# name: (compute capability, streaming multiprocessors, MiB of level-2 cache), from NVIDIA's data sheets.
_GPUS = {
    "T4": ((7, 5), 40, 4),
    "A100": ((8, 0), 108, 40),
    "RTX 3090": ((8, 6), 82, 6),
    "RTX 4090": ((8, 9), 128, 72),
    "L4": ((8, 9), 58, 48),
    "H100": ((9, 0), 132, 50),
    "H200": ((9, 0), 132, 50),
    "B200": ((10, 0), 148, 126),
    "RTX 5090": ((12, 0), 170, 96),
}


@explains_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """The properties of a chip on which the choice of tiles depends.

    Parameters
    ----------
    name : str
        The chip's name, such as those that `DeviceSpec.gpu` accepts.
    compute_capability : (int, int) or None
        None for the host's processor.
    num_processors : int
        Streaming multiprocessors of a GPU, or CPU cores that this process may use.
    tile_memory_bytes : int
        Bytes of fast memory that one tile may fill: shared memory per thread block, or a core's level-2 cache. Tiles
        of the host use at most 8 MiB of it, 16 MiB in float64.
    cache_bytes : int
        Bytes of the level-2 cache that a GPU's multiprocessors share; 0 on the host, where no decision depends on it.

    Raises
    ------
    UnsupportedProblem
        A value is not an integer, or is too small.

    Examples
    --------
    >>> spec = DeviceSpec.gpu("H100")
    >>> spec.compute_capability, spec.num_processors, spec.tile_memory_bytes, spec.cache_bytes
    ((9, 0), 132, 232448, 52428800)
    """

    name: str
    compute_capability: tuple[int, int] | None = None
    num_processors: int
    tile_memory_bytes: int
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        reasons = [] if isinstance(self.name, str) else [f"name must be a str; got {describe(self.name)}"]
        for name, least in (("num_processors", 1), ("tile_memory_bytes", 1), ("cache_bytes", 0)):
            value = getattr(self, name)
            if is_int(value) and value >= least:
                object.__setattr__(self, name, int(value))
            else:
                reasons.append(f"{name} must be an int of at least {least}; got {describe(value)}")
        capability = self.compute_capability
        if isinstance(capability, (tuple, list)) and len(capability) == 2 and all(map(is_int, capability)):
            object.__setattr__(self, "compute_capability", (int(capability[0]), int(capability[1])))
        elif capability is not None:
            rule = "two ints, such as (9, 0), or None for a host"
            reasons.append(f"compute_capability must be {rule}; got {describe(capability)}")
        refuse(reasons)

    @staticmethod
    def host() -> DeviceSpec:
        """Describe the processor that this process runs on.

        Returns
        -------
        DeviceSpec
            A device without a compute capability.

        Examples
        --------
        >>> DeviceSpec.host().compute_capability is None
        True
        """
        return DeviceSpec(name="host", num_processors=_usable_cores(), tile_memory_bytes=_level2_bytes())

    @staticmethod
    def gpu(name: str) -> DeviceSpec:
        """Describe a known GPU by its name, to plan for it without having one.

        Parameters
        ----------
        name : str
            The chip, such as "H100", in upper or lower case; the error about an unknown name lists all of them.

        Returns
        -------
        DeviceSpec
            The numbers of that GPU.

        Raises
        ------
        UnsupportedProblem
            The list does not contain this GPU.

        Examples
        --------
        >>> DeviceSpec.gpu("A100").num_processors
        108
        """
        known = name.upper() if isinstance(name, str) else ""
        if known not in _GPUS:
            raise UnsupportedProblem(
                [f"name must be one of {', '.join(_GPUS)}; got {describe(name)}: build a DeviceSpec from its numbers"]
            )
        capability, num_processors, cache_mib = _GPUS[known]
        return DeviceSpec(
            name=known,
            compute_capability=capability,
            num_processors=num_processors,
            tile_memory_bytes=_SHARED_KIB[capability] * 1024,
            cache_bytes=cache_mib << 20,
        )


def other_device_reasons(planned: DeviceSpec, current: DeviceSpec) -> list[str]:
    """Return why a plan does not run on the current GPU: its machine code or its tiles are for another chip."""
    is_same = planned.compute_capability == current.compute_capability
    if is_same and planned.tile_memory_bytes <= current.tile_memory_bytes:
        return []
    return [f"the plan is for {planned.name}, and the current device is {current.name}: plan without device="]


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _level2_bytes() -> int:
    """Return the size of one core's level-2 cache; 1 MiB if the system does not report it (other than Linux, glibc)."""
    try:
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 1 << 20
    except (AttributeError, ValueError, OSError):
        return 1 << 20
