"""Planted faults in memory that calls reuse: kernel arguments, workspaces, and the inputs of shared plans."""

from __future__ import annotations

import ctypes
from types import ModuleType

import numpy as np
import pytest
from cupy_machine import a_machine_for
from mutations.planting import Edit
from mutations.python_guards import part
from test_call_cache import check_freed, check_steps
from test_kept_index import check_threads
from test_reuse import DENSE, check_outputs, check_summed_gradients
from workspace_memory import memory, stream

SIGNS = (AssertionError, ValueError)  # exceptions with which a guard reports a fault


def workspaces_serve_one_call_at_a_time(library: ModuleType) -> None:
    """Check that workspaces are aligned and disjoint, and shared only by calls that are ordered on one stream."""
    room, need = part(library, "executors.workspaces"), part(library, "planning.launches").Workspace
    where, byte = memory(), np.dtype(np.uint8)
    needs = {"a": need((300,), byte), "zeros": need((40,), byte, True), "b": need((1000,), byte)}
    workspaces = room.Workspaces(needs, where)
    first = workspaces.take(stream())
    a, zeros, b = first.addresses
    assert (b - a) % 256 == 0 and b - a >= 300 and zeros == where.allocated[1].ctypes.data
    assert where.allocated[0].ctypes.data == a and b + 1000 <= a + where.allocated[0].nbytes
    assert {a, zeros} == {*where.outlives}
    for other in (stream(8), stream(2), stream(7, True)):
        taken = workspaces.take(other)
        workspaces.give_back(other, taken)
        again = workspaces.take(other)
        assert not {*taken.addresses} & {*first.addresses} and (taken.addresses == again.addresses) == (other.ptr == 8)
    second = workspaces.take(stream())
    assert second.addresses[0] != a and second.addresses[1] == zeros
    workspaces.give_back(stream(), second)
    workspaces.give_back(stream(), first)
    assert workspaces.take(stream()).addresses == first.addresses
    workspaces.give_back(stream(7, True), workspaces.take(stream(7, True)))
    assert workspaces.take(stream()).addresses == second.addresses
    larger = room.Workspaces({"c": need((5000,), byte)}, where)
    workspaces.give_back(stream(), first)
    larger.take(stream())
    assert where.allocated[-1].nbytes >= 5000


def arguments_serve_one_call_at_a_time(library: ModuleType) -> None:
    """Check that a table points to its kernel's records, which hold the addresses of a call until it releases them."""
    room = part(library, "executors.arguments")
    words = np.arange(6, dtype=np.uint64)
    places = [room.Place(1, 0, 0), room.Place(4, 64, 1)]
    buffers = room.Arguments(words, [[slice(0, 2), slice(2, 6)], [slice(2, 6)]], places)
    first, second = buffers.take([100, 200]), buffers.take([300, 400])
    for buffer, start, other in ((first, 100, 200), (second, 300, 400)):
        (_, (one, two)), (_, (again,)) = buffer.kernels
        assert np.frombuffer(one.tobytes(), np.uint64).tolist() == [0, start]
        assert np.frombuffer(two.tobytes(), np.uint64).tolist() == [2, 3, other + 64, 5]
        for kernel in buffer.kernels:
            table = (ctypes.c_uint64 * len(kernel.records)).from_address(kernel.table)
            assert list(table) == [record.ctypes.data for record in kernel.records]
        assert again.ctypes.data == two.ctypes.data
    buffers.give_back(first)
    assert buffers.take([5, 6]) is first


def cached_calls_are_the_latest(library: ModuleType) -> None:
    """Check that the call cache evicts the least recently used call, and drops calls with their owner."""
    kind = part(library, "planning._call_cache").CallCache
    for steps in (
        [("put", "a", None), ("put", "b", 0), ("put", "c", None), ("get", "a"), ("put", "d", None), ("get", "b")],
        [("put", "a", None), ("put", "b", None), ("put", "a", None), ("put", "c", 1), ("put", "d", 1), ("get", "b")],
        [("put", "a", 0), ("put", "b", 1), ("drop", 0), ("put", "c", 0), ("put", "d", 0), ("drop", 0), ("get", "c")],
        [("put", "a", 0), ("put", "a", None), ("drop", 0), ("get", "a"), ("clear",), ("get", "a")],
    ):
        check_steps(steps, kind)
    check_freed(kind)


def outputs_of_plans_are_bound(library: ModuleType) -> None:
    for mask in (None, DENSE[0]):
        with a_machine_for(library) as machine, pytest.MonkeyPatch.context() as patch:
            check_outputs(machine, patch, library, mask)


def summed_gradients_are_bound(library: ModuleType) -> None:
    for name in ("broadcast keys", "bias"):
        with a_machine_for(library) as machine, pytest.MonkeyPatch.context() as patch:
            check_summed_gradients(machine, patch, library, name)


def threads_send_lists_at_once(library: ModuleType) -> None:
    with a_machine_for(library) as machine:
        check_threads(machine, library)


WORKSPACES, ARGUMENTS, CACHE = "executors/workspaces.py", "executors/arguments.py", "planning/_call_cache.py"
PLANS, BOUND = "plans/plan.py", "executors/_bound_plan.py"
FAULTS = {
    cached_calls_are_the_latest: {
        "the use of a call does not count": Edit(
            CACHE, "CallCache.get", "entry.last_use, self._last =", "_, self._last ="
        ),
        "a call stays with an earlier owner": Edit(
            CACHE, "CallCache._without_owner", "entry.keys.discard(key)", "pass"
        ),
        "a call that is put again keeps its age": Edit(
            CACHE, "CallCache.put", "next(self._uses)", "getattr(left[0], 'last_use', next(self._uses))"
        ),
        "the cache grows without end": Edit(CACHE, "CallCache.put", "> self._size", "> 100 * self._size"),
        "a call that was used leaves": Edit(
            CACHE, "CallCache._least_recently_used", "if last_use == use:", "if True:"
        ),
        "calls stay without their owner": Edit(CACHE, "CallCache.put", "keys.add(key)", "pass"),
        "the last call stays": Edit(CACHE, "CallCache._drop", "self._last = object(), None", "pass"),
    },
    outputs_of_plans_are_bound: {
        "an output over q is written to": Edit(
            BOUND, "BoundPlan.may_overlap", "starts[out] < ends[other] and starts[other] < ends[out]", "False"
        ),
        "outputs overlap each other": Edit(BOUND, "BoundPlan.may_overlap", "in range(out)", "in range(first_out)"),
        "arrays end where they start": Edit(
            BOUND, "BoundPlan.may_overlap", "start + high for start, (_, high)", "start for start, (_, high)"
        ),
        "repeated calls do not look at overlaps": Edit(
            PLANS, "Plan._run", "elif outs and bound.may_overlap(arrays, outs):", "elif False:"
        ),
        "a plan binds each call": Edit(PLANS, "Plan._run", "CALLS.put(key, bound, self._owner)", "pass"),
        "an output is not returned": Edit(
            BOUND, "BoundPlan._with_outs", "outs[name] if name in outs else next(new)", "next(new, None)"
        ),
    },
    summed_gradients_are_bound: {
        "gradients of broadcast axes are those of the last entry": Edit(
            "arrays.py", "summed_to", "gradient.sum(axis=", "gradient.max(axis="
        ),
        "a gradient has the dtype of its sum": Edit(
            BOUND, "BoundPlan._finished", "wanted.shape, wanted.dtype)", "wanted.shape, result.dtype)"
        ),
        "a graph sums in memory that is gone": Edit(
            BOUND, "BoundPlan.run", "self._machine.refuse_copies(self._copies)", "pass"
        ),
        "a pullback binds each call": Edit(
            "calls/pullback.py", "Pullback.__call__", "if key is not None:", "if False:"
        ),
    },
    threads_send_lists_at_once: {
        "threads wait for each other's lists": Edit(
            "executors/gpu.py", "Gpu.device_lists", "with sending:", "with self._lock:"
        ),
    },
    workspaces_serve_one_call_at_a_time: {
        "a piece stays with its stream while a call has it": Edit(
            WORKSPACES, "Workspaces.take", "self._pieces[number].pop()", "self._pieces[number][-1]"
        ),
        "a capture uses the pieces of its stream": Edit(
            WORKSPACES, "Workspaces.take", "or bool(stream.is_capturing())", ""
        ),
        "cudaStreamPerThread is taken for one stream": Edit(
            WORKSPACES, "Workspaces.take", "number == _PER_THREAD or", ""
        ),
        "a stream keeps memory of a call's allocator": Edit(
            WORKSPACES, "Workspaces.take", "self._memory.lasting(self._nbytes) if is_kept else self._own()",
            "self._own()"
        ),
        "a small piece serves a large call": Edit(
            WORKSPACES, "Workspaces.take", "or piece.nbytes < self._nbytes", ""
        ),
    },
    arguments_serve_one_call_at_a_time: {
        "a buffer is free while its call has it": Edit(
            ARGUMENTS, "Arguments.take", "._words, self._kernels)", "._words, self._kernels); self._free.append(buffer)"
        ),
        "addresses are not raised by offsets": Edit(
            ARGUMENTS, "Arguments.take", "addresses[number] + offset", "addresses[number]"
        ),
        "arguments start at the first record": Edit(
            ARGUMENTS, "Buffer.__init__", "[base + 8 * part.start for part in slices]", "[base for part in slices]"
        ),
    },
}
