"""The gate: each kernel that can be asked for compiles for each chip it serves, without a spill or an advice of ptxas.

CUFLASH_PROFILE=long compiles all; the ci profile every third, another third each time a kernel is added.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuflash import DeviceSpec, ShapeDtype, UnsupportedProblem
from cuflash import compile as room
from cuflash import source as sources
from cuflash.compile import Compiled
from cuflash.problem import Problem
from cuflash.source import KernelSpec
from cuflash.tiles import kernel_specs

# One chip for each size of shared memory and each set of instructions that we use.
CHIPS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
MOST_SPECS = 200  # more of them, and the first calls of a program wait for compilers
ROOMS = ("ptx", "tile", "attention")


def every_spec() -> list[KernelSpec]:
    """Each specification that a plan may ask for of the naive family, and one for each entry of the others."""
    entries = sorted(path.relative_to(sources.KERNELS) for path in sources.KERNELS.glob("*/*.cu"))
    sizes = {"head_dim": 64, "value_dim": 64, "block_q": 32, "block_kv": 32}
    specs = [
        KernelSpec(family=path.parts[0], entry=path.stem, dtype=np.dtype(np.float32), **sizes)
        for path in entries
        if path.parts[0] not in (*ROOMS, "naive")
    ]
    for dtype in (np.float16, np.float32):
        problem = Problem.of(*(ShapeDtype((1, 1), dtype),) * 3)
        for largest in (None, (16, 16)):
            specs += kernel_specs("naive", problem, DeviceSpec.gpu("H100"), largest).values()
    return specs


def every_target(specs: list[KernelSpec]) -> list[tuple[KernelSpec, str]]:
    """Each specification with each architecture that its family serves."""
    targets = []
    for spec in specs:
        for chip in CHIPS:
            try:
                targets.append((spec, room.architecture(spec, chip)))
            except UnsupportedProblem:
                continue
    return targets


def chosen(targets: list[tuple[KernelSpec, str]]) -> list[tuple[KernelSpec, str]]:
    """All, or a third that has every specification: its architectures take turns."""
    if os.environ.get("CUFLASH_PROFILE") == "long":
        return targets
    numbers: dict[KernelSpec, int] = {}
    for spec, _ in targets:
        numbers.setdefault(spec, len(numbers))
    names = sorted({name for _, name in targets})
    return [(spec, name) for spec, name in targets if (numbers[spec] + names.index(name)) % 3 == 0 or name == "sm_90a"]


def faults(made: Compiled) -> list[str]:
    """Why a kernel does not pass."""
    found = [f"advice: {line}" for line in made.advisories]
    if made.resources.spill_bytes:
        found.append(f"spills {made.resources.spill_bytes} bytes")
    if made.resources.stack_bytes:
        found.append(f"has a stack of {made.resources.stack_bytes} bytes: an array is indexed at run time, or spilled")
    return found


TARGETS = every_target(every_spec())


def test_the_number_of_specifications_is_bounded(record_property: Callable[[str, object], None]) -> None:
    specs = every_spec()
    print(f"{len(specs)} specifications, {len(TARGETS)} with their architectures, {len(chosen(TARGETS))} chosen")
    record_property("specifications", len(specs))
    assert len(specs) == len(set(specs)) <= MOST_SPECS


def test_the_choice_has_every_specification_and_every_chip() -> None:
    assert {spec for spec, _ in chosen(TARGETS)} == {spec for spec, _ in TARGETS}
    assert {name for _, name in chosen(TARGETS)} == {name for _, name in TARGETS}


@pytest.mark.parametrize(
    ("spec", "architecture"), chosen(TARGETS), ids=[f"{spec}, {name}" for spec, name in chosen(TARGETS)]
)
def test_a_kernel_compiles_without_a_spill_or_advice(nvrtc: Any, spec: KernelSpec, architecture: str) -> None:
    made = room.cubin(spec, architecture)
    print(made)
    assert faults(made) == []


# The gate itself, on kernels made to pass and to fail.


@pytest.mark.parametrize("chip", CHIPS)
def test_a_good_kernel_passes_on_every_chip(
    nvrtc: Any, kernels: Path, spec: Callable[..., KernelSpec], chip: tuple[int, int]
) -> None:
    assert faults(room.cubin(spec("plain"), room.architecture(spec("plain"), chip))) == []


@pytest.mark.parametrize(
    ("family", "entry", "architecture", "words"),
    [
        ("simt", "spills", "sm_90", "spills"),
        ("simt", "spills", "sm_75", "spills"),
        ("sm90", "serialised", "sm_90a", "C75"),
    ],
)
def test_a_bad_kernel_does_not_pass(
    nvrtc: Any, kernels: Path, spec: Callable[..., KernelSpec], family: str, entry: str, architecture: str, words: str
) -> None:
    assert any(words in fault for fault in faults(room.cubin(spec(entry, family=family), architecture)))


def test_the_choice_takes_a_third(spec: Callable[..., KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_PROFILE", raising=False)
    targets = every_target([spec(str(number)) for number in range(30)])
    assert len(targets) == 30 * len(CHIPS) and len(targets) / 4 < len(chosen(targets)) <= len(targets) / 2
    assert {one for one, _ in chosen(targets)} == {one for one, _ in targets}
    assert {name for _, name in chosen(targets)} == {name for _, name in targets}
    monkeypatch.setenv("CUFLASH_PROFILE", "long")
    assert chosen(targets) == targets
