"""Calls reuse memory, and share launches: with arrays of other libraries, and with new masks."""

from __future__ import annotations

import gc
import threading

import numpy as np
from cuflash.calls._call import Call
from cuflash.planning._call_cache import CALLS
import pytest

import cuflash
from cuflash import masks
from cuflash.calls import listed_plan
from cuflash.compiler import nvrtc as compiling
from cuflash.executors import gpu
from cuflash.planning import plan_cache
from cuflash.testing import Example, assert_within_bounds
from library_parts import part
from test_launch import DO, K, Q, V, Foreign, pulled, require_bounds
from refusals import reasons_of

RNG = np.random.default_rng(1)
DENSE = RNG.random((3, 40, 40)) < 0.4
KEPT = RNG.random((3, 5, 5)) < 0.5
MASKS = {
    "elements": lambda take, turn: take(DENSE[turn]),
    "elements and a closed form": lambda take, turn: masks.Dense(take(DENSE[turn])) & masks.Causal(),
    "blocks": lambda take, turn: masks.BlockPattern(take(KEPT[turn]), 8),
}


def asks_nothing_again(monkeypatch):
    for place, name in ((Call, "plan"), (gpu, "BoundPass"), (gpu, "ListMaker")):
        monkeypatch.setattr(place, name, lambda *args, name=name, **options: pytest.fail(f"{name} again"))


# Workspaces.


def test_repeated_calls_allocate_their_results_alone(cupy):
    arrays, do = [cupy.asarray(array) for array in (Q, K, V)], cupy.asarray(DO)
    _, vjp = cuflash.attention_vjp(*arrays)
    vjp(do)
    for options, num_arrays in (({}, 1), ({"return_lse": True}, 2)):
        cuflash.attention(*arrays, **options)
        before = cupy.allocated
        cuflash.attention(*arrays, **options)
        assert cupy.allocated == before + num_arrays
    before = cupy.allocated
    vjp(do)
    assert cupy.allocated == before + 3


@pytest.mark.parametrize("bias", [None, K @ K.swapaxes(-1, -2)], ids=["plain", "bias"])
def test_a_pullback_looks_at_each_cotangent(cupy, monkeypatch, bias):
    """After a first call, cotangents with other layouts are accepted, wrong ones refused; equal ones plan nothing."""
    operands = {"sink": np.ones(2, np.float32)}
    operands |= {} if bias is None else {"score": cuflash.scores.bias(bias), "wrt": ("bias",)}
    wrt, device_bias = operands.get("wrt", ()), None if bias is None else cupy.asarray(bias)
    options = {"wrt": wrt, "sink": cupy.asarray(operands["sink"])}
    pullbacks = [cuflash.attention_vjp(*map(cupy.asarray, (Q, K, V)), bias=device_bias, **options)[1] for _ in range(2)]
    turned = cupy.asarray(DO.swapaxes(-1, -2).copy()).swapaxes(-1, -2)
    pullbacks[0](cupy.asarray(DO))
    pullbacks[0](turned)
    monkeypatch.setattr(gpu, "bind", lambda *arguments, **options: pytest.fail("bound again"))
    for vjp in pullbacks:
        for do, scale in ((cupy.asarray(DO), 1), (turned, 1), (cupy.asarray(2 * DO), 2)):
            results = vjp(do)
            named = dict(zip(("dq", "dk", "dv"), results, strict=True)) | {name: results[name] for name in wrt}
            require_bounds(named, do=scale * DO, **operands)
        for wrong, message in ((DO.astype(np.float64), "float64"), (DO[:1], "(1, 40, 16)")):
            (reason,) = reasons_of(vjp, cupy.asarray(wrong))
            assert reason.startswith("do must have shape") and message in reason
    with cupy.cuda.Device(1):
        reasons = reasons_of(pullbacks[0], cupy.asarray(DO))
    assert any("q must be on the current device, 1" in reason for reason in reasons)


def test_an_lse_that_nobody_wants_changes_nothing(cupy):
    arrays = [cupy.asarray(array) for array in (Q, K, V)]
    o, lse = cuflash.attention(*arrays, return_lse=True)
    for _ in range(2):
        assert (cuflash.attention(*arrays).get() == o.get()).all()
        out = cupy.empty(Q.shape, np.float32)
        assert cuflash.attention(*arrays, out=out) is out and (out.get() == o.get()).all()
        again = cuflash.attention(*arrays, return_lse=True)
        assert all((x.get() == y.get()).all() for x, y in zip(again, (o, lse)))


def test_calls_of_one_stream_that_are_launched_at_once_have_memory_of_their_own(cupy):
    """Another thread makes a call between two kernel launches of a call."""
    launch, between = cupy.cuda.driver.launchKernel, []

    def launched(*arguments):
        launch(*arguments)
        if between:
            thread = threading.Thread(target=between.pop())
            thread.start()
            thread.join()

    cupy.cuda.driver.launchKernel = launched
    _, vjp = cuflash.attention_vjp(*map(cupy.asarray, (Q, K, V)))
    do, results = cupy.asarray(DO), []
    expected = [x.get() for x in vjp(do)]
    between.append(lambda: results.extend(vjp(cupy.asarray(2 * DO))))
    assert all((ours.get() == x).all() for ours, x in zip(vjp(do), expected)) and len(results) == 3
    assert all((ours.get() == 2 * x).all() for ours, x in zip(results, expected))  # gradients are linear in do


# Seeds and offsets of dropout.

DROPOUTS = [cuflash.Dropout(0.4, *numbers) for numbers in ((3, 0), (3, 1), (2**64 - 1, 2**32 - 1))]


@pytest.mark.parametrize("name", [None, "elements", "out"])
def test_a_new_seed_or_offset_asks_nothing_again(cupy, monkeypatch, name):
    """Calls plan, bind and compile once for all seeds and offsets; each pullback uses the numbers of its own call."""
    mask = None if name != "elements" else DENSE[0]
    arrays, do = [cupy.asarray(array) for array in (Q, K, V)], cupy.asarray(DO)
    arguments = {"mask": None if mask is None else cupy.asarray(mask)}

    def call(dropout):
        out = cupy.empty(Q.shape, np.float32) if name == "out" else None
        return cuflash.attention_vjp(*arrays, dropout=dropout, out=out, **arguments)

    _, vjp = call(DROPOUTS[0])
    vjp(do)
    asks_nothing_again(monkeypatch)
    monkeypatch.setattr(compiling, "kernel", lambda *args, **options: pytest.fail("compiled again"))
    outputs = [call(dropout) for dropout in DROPOUTS]
    for (o, vjp), dropout in zip(reversed(outputs), reversed(DROPOUTS)):
        require_bounds({"o": o, **pulled(vjp, do)}, mask=mask, dropout=dropout)


@pytest.mark.parametrize("executor", ["cpu", "sim"])
def test_a_new_seed_or_offset_is_no_new_plan_on_the_host(monkeypatch, executor):
    CALLS.clear()
    plan_cache._cached_plan.cache_clear()
    results = {cuflash.attention(Q, K, V, dropout=each, executor=executor).tobytes() for each in DROPOUTS}
    assert len(results) == 3 and plan_cache._cached_plan.cache_info().misses == 1


def test_plans_for_new_masks_and_seeds_share_launches(cupy, monkeypatch):
    arrays = [cupy.asarray(array) for array in (Q, K, V)]
    for turn, dropout in enumerate(DROPOUTS):
        ready = cuflash.plan(*arrays, mask=cupy.asarray(DENSE[turn]), dropout=dropout)
        require_bounds({"o": ready.forward(*arrays)[0]}, mask=DENSE[turn], dropout=dropout)
        asks_nothing_again(monkeypatch)


# Arrays of other libraries.


def results(arrays, do, mask):
    o, vjp = cuflash.attention_vjp(*arrays, mask=mask)
    return {"o": o, **pulled(vjp, do)}


def on_device(array):
    return Foreign(array, (2, 0))


@pytest.mark.parametrize("name", [None, *MASKS])
def test_repeated_calls_with_arrays_of_other_libraries_ask_nothing_again(cupy, monkeypatch, name):
    make = (lambda take, turn: None) if name is None else MASKS[name]
    call = lambda turn: results(map(on_device, (Q, K, V)), on_device(DO), make(on_device, turn))  # noqa: E731
    call(0)
    asks_nothing_again(monkeypatch)
    for turn in range(3):
        require_bounds(call(turn), mask=make(np.asarray, turn))


def test_repeated_calls_of_a_plan_take_arrays_of_other_libraries(cupy, monkeypatch):
    ready = cuflash.plan(*map(cupy.asarray, (Q, K, V)))
    for _ in range(2):
        arrays = [on_device(array) for array in (Q, K, V)]
        o, lse = ready.forward(*arrays)
        dq, dk, dv = ready.backward(on_device(DO), *arrays, o, lse)
        require_bounds({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
        asks_nothing_again(monkeypatch)
        monkeypatch.setattr(gpu, "bind", lambda *arguments, **options: pytest.fail("bound again"))


def test_an_output_of_another_library_is_written_by_a_repeated_call(cupy, monkeypatch):
    for turn in range(2):
        out = np.zeros_like(Q)
        cuflash.attention(*map(on_device, (Q, K, V)), out=on_device(out))
        assert_within_bounds(Example(q=Q, k=K, v=V), o=out)
        asks_nothing_again(monkeypatch)


def bound_once(monkeypatch, library):
    """Collect in a list all bindings from this point on."""
    room, bindings = part(library, "executors.gpu"), []
    bind = room.bind
    monkeypatch.setattr(
        room, "bind", lambda *arguments, **options: bindings.append(arguments) or bind(*arguments, **options)
    )
    return bindings


def check_outputs(machine, monkeypatch, library, mask):
    """Check that a plan binds once per layout of outputs, and refuses outputs that overlap another array."""
    arrays = [machine.asarray(array) for array in (Q, K, V)]
    ready = library.plan(*arrays, mask=None if mask is None else machine.asarray(mask))
    lse_shape = ready.forward(*arrays)[1].shape
    bindings = bound_once(monkeypatch, library)
    for turn in range(3):
        o, lse = machine.empty(Q.shape, np.float32), machine.empty(lse_shape, np.float32)
        for out in (o, (o, lse)):
            results = ready.forward(*arrays, out=out)
            assert results[0] is o and (len(out) != 2 or results[1] is lse or out is o)
            require_bounds({"o": o, "lse": results[1]}, mask=mask)
    assert len(bindings) == 2
    room = o.reshape(-1)[: lse.size].reshape(lse_shape)
    for out, said in ((arrays[0], "out must not overlap q in memory"), ((o, room), "out[0] and out[1] must not")):
        try:
            ready.forward(*arrays, out=out)
        except library.UnsupportedProblem as error:
            assert error.reasons[0].startswith(said)
        else:
            raise AssertionError(f"{said}: is written to")


@pytest.mark.parametrize("mask", [None, DENSE[0]], ids=["no mask", "mask on the device"])
def test_a_plan_that_writes_to_given_arrays_is_bound_once(cupy, monkeypatch, mask):
    check_outputs(cupy, monkeypatch, cuflash, mask)


def check_summed_gradients(machine, monkeypatch, library, name):
    """Check that broadcast gradients, and those rounded afterwards, are bound once, outside graphs."""
    bias = RNG.standard_normal((1, 1, K.shape[-2])).astype(np.float16)
    q = np.stack([Q, Q[::-1]]) if name == "broadcast keys" else Q
    do = np.stack([DO, DO[::-1]]) if name == "broadcast keys" else DO
    operands = {} if name == "broadcast keys" else {"score": cuflash.scores.bias(bias), "wrt": ("bias",)}
    options = {"bias": machine.asarray(bias), "wrt": "bias"} if operands else {}
    arrays = [machine.asarray(array) for array in (q, K, V)]
    bindings = bound_once(monkeypatch, library)
    for _ in range(3):
        _, vjp = library.attention_vjp(*arrays, **options)
        results = vjp(machine.asarray(do))
        named = dict(zip(("dq", "dk", "dv"), results)) | ({"bias": results["bias"]} if operands else {})
        assert {each: array.dtype for each, array in named.items()} == {each: np.float32 for each in named} | (
            {"bias": np.float16} if operands else {}
        )
        require_bounds(named, q=q, do=do, **operands)
    assert len(bindings) == 2  # one for a forward pass, one for a backward pass
    on_device, stream = machine.asarray(do), machine.cuda.Stream()
    with stream:
        stream.begin_capture()
        try:
            vjp(on_device)
        except RuntimeError as error:
            assert "gradients over broadcast axes are summed in memory that a graph would outlive" in str(error)
        else:
            raise AssertionError("a graph sums in memory that is gone")
        stream.end_capture()


@pytest.mark.parametrize("name", ["broadcast keys", "bias"])
def test_gradients_that_are_summed_or_rounded_afterwards_are_bound_once(cupy, monkeypatch, name):
    check_summed_gradients(cupy, monkeypatch, cuflash, name)


# Plans for masks on the device.


def test_a_plan_tells_all_that_is_wrong_with_arrays_of_other_libraries(cupy):
    q, k, v = map(on_device, (Q, K, V))
    options = {"mask": on_device(DENSE[0]), "kernel": "fast", "scale": "1"}
    (kernel, scale) = sorted(reasons_of(cuflash.plan, q, k, v, **options))
    assert kernel.startswith("kernel must be") and scale.startswith("scale must be")


@pytest.mark.parametrize("library", ["cupy", "another"])
@pytest.mark.parametrize("name", MASKS)
def test_plans_for_new_masks_share_launches_and_read_each_mask_once(cupy, monkeypatch, name, library):
    send = cupy.asarray if library == "cupy" else on_device
    arrays, do = [send(array) for array in (Q, K, V)], send(DO)
    call_masks = [MASKS[name](send, turn) for turn in range(3)]
    plans = [cuflash.plan(*arrays, mask=call_masks[0])]
    plans[0].backward(do, *arrays, *plans[0].forward(*arrays))
    asks_nothing_again(monkeypatch)
    plans += [cuflash.plan(*arrays, mask=mask) for mask in call_masks[1:]]
    monkeypatch.setattr(listed_plan, "lookup", lambda *arguments: pytest.fail("looked up again"))
    for turn, ready in enumerate(plans):
        o, lse = ready.forward(*arrays)
        dq, dk, dv = ready.backward(do, *arrays, o, lse)
        require_bounds({"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, mask=MASKS[name](np.asarray, turn))


def test_a_plan_for_a_mask_on_the_device_tells_the_blocks_of_its_mask(cupy):
    arrays = [cupy.asarray(array) for array in (Q, K, V)]
    for turn in range(2):
        on_device, on_host = (
            cuflash.plan(*arrays, mask=masks.BlockPattern(take(KEPT[turn][:2, :2]), 20)).explain()
            for take in (cupy.asarray, np.asarray)
        )
        lines = [
            [line for line in text.splitlines() if line.startswith(("work ", "FLOPs"))] for text in (on_device, on_host)
        ]
        assert lines[0] == lines[1] and len(lines[0]) == 2


def test_other_streams_wait_for_the_lists_of_a_plan_which_wait_for_them(cupy):
    arrays = [cupy.asarray(array) for array in (Q, K, V)]
    cupy.events_are_reached = False
    ready = cuflash.plan(*arrays, mask=cupy.asarray(DENSE[0]))
    (recorded,) = [entry[2] for entry in cupy.log if entry[0] == "record"]
    stream = cupy.cuda.Stream()
    with stream:
        ready.forward(*arrays)
    assert ("wait", stream.ptr, recorded) in cupy.log
    cupy.log.clear()
    del ready
    gc.collect()
    cuflash.plan(*arrays, mask=cuflash.BlockIndex.from_blocks(KEPT[0], 40, 40, 8)).forward(*arrays)
    assert ("record", stream.ptr) in [entry[:2] for entry in cupy.log]
    assert ("wait", 0) in [entry[:2] for entry in cupy.log]


@pytest.mark.parametrize("options", [{"out": True}, {"check": True}], ids=str)
def test_a_plan_for_a_mask_on_the_device_runs_unbound_too(cupy, monkeypatch, options):
    arrays = [cupy.asarray(array) for array in (Q, K, V)]
    ready = cuflash.plan(*arrays, mask=cupy.asarray(DENSE[0]))
    if "check" in options:
        monkeypatch.setenv("CUFLASH_CHECK", "1")
    out = cupy.empty(Q.shape, np.float32) if "out" in options else None
    o, _ = ready.forward(*arrays, out=out)
    require_bounds({"o": o}, mask=DENSE[0])


def test_a_plan_for_a_mask_on_the_device_takes_its_sink_at_each_call(cupy):
    arrays, sinks = [cupy.asarray(array) for array in (Q, K, V)], RNG.standard_normal((2, 2)).astype(np.float32)
    ready = cuflash.plan(*arrays, mask=cupy.asarray(DENSE[0]), sink=cupy.asarray(sinks[0]))
    for sink in sinks:
        o, _ = ready.forward(*arrays, sink=cupy.asarray(sink))
        require_bounds({"o": o}, mask=DENSE[0], sink=sink)
