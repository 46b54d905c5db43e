"""Faults in how calls meet killed processes, full disks, failed kernels and memory that runs out."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from cupy_machine import a_machine_for
from mutations.planting import Edit
from mutations.python_guards import part
from test_cache_faults import check_a_folder_that_stores_nothing_is_passed, check_folders_are_private
from test_memory_growth import check_workspaces_share_memory
from test_launch import check_passes_are_compiled_together
from test_faults import (
    CASES, Pool, check_a_call_that_runs_out_of_memory, check_checks_blame_no_kernel_for_an_earlier_one,
    check_earlier_failures_are_named,
)  # fmt: skip

# Exceptions by which guards see a fault. pytest.raises fails with an exception of its own where nothing was raised.
SIGNS = (AssertionError, ValueError, RuntimeError, pytest.fail.Exception)


def abandoned_folders_are_removed(library: ModuleType) -> None:
    """Check that folders of compilers that were killed are removed after a day, and no others."""
    room = part(library, "compiler.host_cache")
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUFLASH_CACHE_DIR", place)
        folder = room.folder()
        for remove in (lambda: room.shrink(folder), room.cache_clear):
            for name, days in (("old", -2), ("of the future", 2), ("new", 0)):
                each = folder / f"{room.BUILDING}{name}"
                each.mkdir(parents=True, exist_ok=True)
                (each / "kernel.o").touch()
                os.utime(each, (each.stat().st_mtime + 86400 * days,) * 2)
            remove()
            assert [path.name for path in folder.iterdir()] == [f"{room.BUILDING}new"]


def full_disks_are_passed(library: ModuleType) -> None:
    """Check that kernels are compiled in a temporary folder, with one warning, if the cache's disk is full."""
    with tempfile.TemporaryDirectory() as place:
        check_a_folder_that_stores_nothing_is_passed(library, Path(place), errno.ENOSPC)


def folders_are_private(library: ModuleType) -> None:
    with tempfile.TemporaryDirectory() as place:
        check_folders_are_private(library, Path(place))


def earlier_failures_are_named(library: ModuleType) -> None:
    """Check that the failure of an earlier kernel is named as such by calls of each kind."""
    for name in ("attention", "gradients of a new mask", "a plan"):
        with a_machine_for(library) as machine:
            check_earlier_failures_are_named(library, machine, name)
    with a_machine_for(library) as machine:
        check_checks_blame_no_kernel_for_an_earlier_one(library, machine)


def memory_may_run_out(library: ModuleType) -> None:
    """Check that a failed allocation leaves no memory behind, and that the next call is right."""
    for name in ("gradients", "gradients of a new mask", "gradients of a bias"):
        with a_machine_for(library) as machine:
            check_a_call_that_runs_out_of_memory(Pool(machine), CASES[name](library, machine), ())


def passes_are_compiled_together(library: ModuleType) -> None:
    """Check that calls compile the kernels of all their passes, and no others, before the first launch."""
    for name in ("attention", "attention_vjp", "attention_jvp", "attention_hvp"):
        with a_machine_for(library) as machine:
            check_passes_are_compiled_together(library, machine, name)


def workspaces_share_memory(library: ModuleType) -> None:
    check_workspaces_share_memory(library)


HOST_CACHE, COMPILER, GPU, NVRTC = "compiler/host_cache.py", "sim/compiler.py", "executors/gpu.py", "compiler/nvrtc.py"
WORKSPACES = "executors/workspaces.py"
FAULTS = {
    workspaces_share_memory: {
        "each size of a workspace keeps memory": Edit(
            WORKSPACES, "kept_bytes", "max(_ALIGNMENT, 1 << (workspace.nbytes - 1).bit_length())", "workspace.nbytes"
        ),
        "workspaces of a call share zeros": Edit(
            WORKSPACES, "Workspaces.__init__", "memory.kept_zeros(number, nbytes)", "memory.kept_zeros(0, nbytes)"
        ),
        "zeros are too short": Edit(WORKSPACES, "kept_bytes", "(workspace.nbytes - 1)", "(workspace.nbytes // 2)"),
    },
    abandoned_folders_are_removed: {
        "folders of killed compilers stay": Edit(HOST_CACHE, "shrink", "_remove_abandoned(place)", "pass"),
        "folders of killed compilers stay in a cache that is cleared": Edit(
            HOST_CACHE, "cache_clear", "_remove_abandoned(was.folder)", "pass"
        ),
        "folders of running compilers are removed": Edit(
            HOST_CACHE, "_remove_abandoned", "> _ABANDONED_SECONDS", ">= 0"
        ),
        "folders of the future stay": Edit(
            HOST_CACHE, "_remove_abandoned", "abs(now - folder.stat().st_mtime)", "(now - folder.stat().st_mtime)"
        ),
    },
    full_disks_are_passed: {
        "a full disk stops every kernel": Edit(
            COMPILER, "build", "_unusable[folder] = str(error)", "raise"
        ),
        "a full disk is tried again for each kernel": Edit(
            COMPILER, "cache_directory", "_unusable.get(folder) or host_cache.make_folder(folder)",
            "_unusable.pop(folder, '') or host_cache.make_folder(folder)",
        ),
    },
    folders_are_private: {
        "parents of the cache are open to others": Edit(
            HOST_CACHE, "make_folder", "folder.mkdir(mode=0o700, exist_ok=True)",
            "folder.mkdir(mode=0o700 if folder == place else 0o777, exist_ok=True)",
        ),
    },
    earlier_failures_are_named: {
        "a call passes the error of an earlier kernel on": Edit(
            GPU, "bind.call",
            "except RuntimeError as error: raise_earlier(error) raise", "except RuntimeError: raise",
        ),
        "a first call passes the error of an earlier kernel on": Edit(
            NVRTC, "current_device", "except RuntimeError as error: raise_earlier(error)",
            "except RuntimeError: pass",
        ),
        "checks blame a kernel for an earlier one": Edit(
            GPU, "Gpu.launcher", "if checks.is_on():", "if False:"
        ),
    },
    passes_are_compiled_together: {
        "gradients are compiled after the forward pass": Edit(
            "plans/plan.py", "Plan._bind", "(name, *later) if", "(name, *later[:-1]) if"
        ),
        "products with a Hessian are compiled one pass after the other": Edit(
            "calls/tangents.py", "pull", '("jvp", "backward", "backward_jvp")', '("jvp",)'
        ),
        "calls without gradients compile the backward pass": Edit(
            "plans/plan.py", "Plan._bind", "(name, *later) if", '(name, *later, "backward") if',
        ),
        "the longest text is compiled last": Edit(
            NVRTC, "precompile", "len(source(spec)), reverse=True", "len(source(spec))"
        ),
        "kernels of later passes are not compiled": Edit(
            GPU, "Gpu.prepare", "for each in later for launch", "for each in () for launch",
        ),
    },
    memory_may_run_out: {
        "a failed allocation keeps what was taken before it": Edit(
            GPU, "bind.call", "outputs = [make() for make in makers]",
            "outputs = _captured.setdefault(plan, [])\noutputs += (make() for make in makers)\n"
            "outputs = outputs[-len(makers):]",
        ),
    },
}  # fmt: skip
