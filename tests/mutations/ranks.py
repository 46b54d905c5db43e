"""Planted faults in calls on a part of a longer sequence, and in calls on several ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from cuflash.compiler import source
from cuflash.distributed._schedule import RECEIVING
from cuflash.testing import Example, assert_within_bounds
from cupy_machine import a_machine_for
from lazy_lanes import LazyLanes
from library_parts import part
from mutations.planting import Edit

import cuflash
import cupy_machine
import ranks_of_a_store

# exceptions with which a guard reports a fault
SIGNS = (AssertionError, ValueError, IndexError, RuntimeError, KeyError)
LENGTH, HEADS = 45, 8
RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, HEADS, LENGTH, 8), dtype=np.float32)
TABLE = RNG.standard_normal((HEADS, LENGTH, LENGTH), dtype=np.float32)
SINK = np.linspace(-1, 1, HEADS, dtype=np.float32)


def _options(library: ModuleType) -> dict[str, dict[str, Any]]:
    return {
        "causal": {"causal": True},
        "a window and a bias": {"window": (11, 0), "bias": TABLE, "wrt": "bias"},
        "a function": {"mask": lambda b, h, i, j: (7 * (i // 3) + 3 * (j // 5) + h) % 4 > 0},
        "dropout and a sink": {"dropout": library.Dropout(0.25, seed=3), "sink": SINK, "wrt": "sink", "causal": True},
        "sequences": {"mask": library.masks.Sequences([0, 10, 31, LENGTH], causal=True)},
    }


def _expected(name: str) -> dict[str, np.ndarray]:
    (o, lse), vjp = cuflash.attention_vjp(Q, K, V, return_lse=True, **_options(cuflash)[name])
    gradients = vjp(DO)
    results = {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return results | {f"d{each}": gradients[each] for each in gradients.others}


@contextmanager
def _many_groups(library: ModuleType) -> Iterator[pytest.MonkeyPatch]:
    """Make the cost model expect that groups of heads cost nothing, so that short calls have many, too."""
    machine = part(library, "distributed").Machine(launch=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part(library, "distributed._posed"), "TYPICAL", machine)
        yield patch


def _on_ranks(library: ModuleType, name: str, size: int, seed: int | None, **how: Any) -> dict[str, np.ndarray]:
    distributed = part(library, "distributed")

    def rank(group: Any) -> dict[str, np.ndarray]:
        options = {"seqlen": LENGTH, "num_heads": HEADS, "batch": (2,), "block": 4, "method": "gather"}
        cp = distributed.ContextParallel(group, **options | how, **_options(library)[name])
        (o, lse), vjp = cp.attention_vjp(*(cp.shard(x) for x in (Q, K, V)), return_lse=True)
        gradients = vjp(cp.shard(DO))
        rows = {"o": o, "lse": lse[..., None], "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
        whole = {each: cp.unshard(x) for each, x in rows.items()}
        whole["lse"] = whole["lse"][..., 0]
        return whole | {f"d{each}": gradients[each] for each in gradients.others}

    with _many_groups(library):
        return distributed.run(rank, size=size, timeout=5, seed=seed)[0]


def ranks_agree(library: ModuleType) -> None:
    """Check the results of ranks against those of one call."""
    for name in _options(library):
        expected = _expected(name)
        layouts = ({"layout": "auto"}, {"layout": "contiguous"}, {"method": "heads", "size": 2})
        for seed, how in enumerate(layouts):
            results = _on_ranks(library, name, **{"size": 3, "seed": seed} | how)
            for each, exact in expected.items():
                np.testing.assert_allclose(results[each], exact, atol=3e-5, err_msg=f"{name} {how} {each}")


def buffers_are_used_in_turn(library: ModuleType) -> None:
    """Check results in many orders of ready steps."""
    expected = _expected("causal")
    for seed in range(6):
        results = _on_ranks(library, "causal", 2, seed)
        for each, exact in expected.items():
            np.testing.assert_allclose(results[each], exact, atol=3e-5, err_msg=each)


def bits_do_not_depend_on_the_order_of_arrival(library: ModuleType) -> None:
    """Check that any order of ready steps gives equal bits."""
    first, *others = (_on_ranks(library, "causal", 5, seed) for seed in range(6))
    for other in others:
        assert all(np.array_equal(other[each], x) for each, x in first.items())


def streams_wait_for_events(library: ModuleType) -> None:
    """Check ranks whose steps are queued, and run as late or as early as events allow."""
    distributed, threads = part(library, "distributed"), part(library, "distributed._threads")
    expected = _expected("causal")

    def rank(group: Any, method: str) -> dict[str, np.ndarray]:
        cp = distributed.ContextParallel(
            group, seqlen=LENGTH, num_heads=HEADS, batch=(2,), block=4, method=method, causal=True
        )
        own = [np.full_like(cp.shard(x), np.nan) for x in (Q, K, V, DO)]

        def fill() -> None:
            for mine, whole in zip(own, (Q, K, V, DO)):
                mine[...] = cp.shard(whole)

        def spoil() -> None:
            for mine in own:
                mine[...] = np.nan

        group._lanes.queue(fill)
        o = cp.attention(*own[:3])
        group._lanes.queue(spoil)
        for turn in range(group.size):
            if turn == group.rank:
                group._lanes.synchronize()
                np.testing.assert_allclose(o, cp.shard(expected["o"]), atol=3e-5)
            group.exchange("a turn", turn)
        group._lanes.queue(fill)
        o, vjp = cp.attention_vjp(*own[:3])
        gradients = vjp(own[3])
        group._lanes.queue(spoil)
        whole = {"o": cp.unshard(o)} | {each: cp.unshard(getattr(gradients, each)) for each in ("dq", "dk", "dv")}
        group._lanes.synchronize()
        return whole

    for LazyLanes.early in ((), (RECEIVING,), (1,), (1, RECEIVING)):
        for method, size, seed in (("heads", 2, None), ("gather", 3, None), ("gather", 3, 0)):
            with _many_groups(library) as patch:
                patch.setattr(threads, "DeviceLanes", LazyLanes)
                patch.setattr(threads, "device_count", lambda: 1)
                ranks = distributed.run(partial(rank, method=method), devices=[0] * size, timeout=5, seed=seed)
            for results in ranks:
                for each, x in results.items():
                    np.testing.assert_allclose(x, expected[each], atol=3e-5, err_msg=each)


def processes_agree(library: ModuleType) -> None:
    """Check the code of processes on threads."""
    distributed, processes = part(library, "distributed"), part(library, "distributed._processes")
    for method in ("gather", "heads"):
        expected = _expected("dropout and a sink")

        def rank(group: Any) -> dict[str, np.ndarray]:
            options = {"seqlen": LENGTH, "num_heads": HEADS, "batch": (2,), "block": 4, "method": method}
            cp = distributed.ContextParallel(group, **options, **_options(library)["dropout and a sink"])
            o, vjp = cp.attention_vjp(*(cp.shard(x) for x in (Q, K, V)))
            gradients = vjp(cp.shard(DO))
            rows = {"o": o} | {each: getattr(gradients, each) for each in ("dq", "dk", "dv")}
            return {each: cp.unshard(x) for each, x in rows.items()} | {"dsink": gradients["sink"]}

        with _many_groups(library):
            ranks = ranks_of_a_store.run(processes, 2, rank)
        for results in ranks:
            assert isinstance(results, dict), results
            for each, x in results.items():
                np.testing.assert_allclose(x, expected[each], atol=3e-5, err_msg=each)


def devices_agree(library: ModuleType) -> None:
    """Check ranks with arrays of a stand-in for two GPUs, whose kernels run in the simulator."""
    distributed, options = part(library, "distributed"), {"window": (9, 0), "kernel": "simt"}
    q, k, v, do = np.random.default_rng(1).standard_normal((4, 2, 40, 16), dtype=np.float32)
    o, vjp = cuflash.attention_vjp(q, k, v, window=(9, 0))
    expected = o, *vjp(do)
    with a_machine_for(library) as machine, _many_groups(library):
        copies = cupy_machine.copies_at_once(machine)

        def rank(group: Any) -> list[np.ndarray]:
            cp = distributed.ContextParallel(
                group, seqlen=40, num_heads=2, block=8, method="gather", layout="contiguous", **options
            )
            received = [cp._posed.moved(group.rank, 1 - group.rank), cp._posed.own_keys(group.rank)[:, 0]]
            assert np.array_equal(np.sort(np.concatenate(received)), np.arange(40)), "each key is written once"
            q_, k_, v_, do_ = (machine.asarray(cp.shard(x)) for x in (q, k, v, do))
            for _ in range(2):
                o, vjp = cp.attention_vjp(q_.copy(), k_.copy(), v_.copy())
                gradients = vjp(do_)
            return [cp.unshard(x).get() for x in (o, *gradients)]

        ranks = distributed.run(rank, devices=[0, 1], timeout=30)
        for results in ranks:
            for x, exact in zip(results, expected):
                np.testing.assert_allclose(x, exact, atol=3e-5)
    backward = [height for _, height in copies[4:10]]
    assert backward == [1, 1, 1, 1, 2, 2], "dk and dv are one copy"


def faults_end_all_processes(library: ModuleType) -> None:
    """Check what the code of processes raises if a rank raises, stops, or does not arrive."""
    distributed, processes = part(library, "distributed"), part(library, "distributed._processes")

    def ended(function: Any, **how: Any) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "BEAT", 0.05)
            patch.setattr(processes, "SILENCE", 0.5)
            results = ranks_of_a_store.run(processes, 3, function, **how)
        return [f"{type(each).__name__}: {each}" for each in results]

    def parallel(group: Any, **options: Any) -> Any:
        options = {"num_heads": 1, "method": "gather"} | options
        return distributed.ContextParallel(group, seqlen=16, block=4, **options)

    def raises(group: Any) -> None:
        if group.rank == 1:
            raise OSError("a disk is full")
        parallel(group)

    def raises_in_a_pass(group: Any) -> None:
        cp, x = parallel(group, num_heads=3, method="heads"), np.ones((3, 16, 4))
        if group.rank == 1:
            group._lanes.copier = None  # which copies a rank's own rows before they move
        cp.attention(*(cp.shard(x) for _ in range(3)))

    def stops(group: Any) -> None:
        if group.rank != 1:
            parallel(group)

    def is_late(group: Any) -> None:
        if group.rank == 1:
            time.sleep(1.5)
        parallel(group)

    def asks_for_another(group: Any) -> None:
        group.exchange("a product" if group.rank == 2 else "a sum", group.rank)

    closed = "This group is closed: start the ranks again"
    lost = f"PeerLost: rank 1 raised OSError: a disk is full. {closed}"
    assert ended(raises) == [lost, "OSError: a disk is full", lost]
    first, _, last = ended(raises_in_a_pass)
    assert first == last and first.startswith("PeerLost: rank 1 raised TypeError: ")
    first, _, last = ended(stops, is_alive=lambda rank: rank != 1)
    assert first == last and first.startswith("PeerLost: rank 1 stopped answering, "), first
    first, _, last = ended(is_late, timeout=0.6)
    late = "rank 1 did not arrive at ContextParallel, where ranks 0, 2 waited, within 0.6 s"
    assert first == last == f"PeerLost: {late}. {closed}"
    alike = "UnsupportedProblem: ranks must ask for the same call: rank 0 asks for a sum, rank 2 for a product"
    assert ended(asks_for_another) == [alike] * 3


def _raised(library: ModuleType, rank: Any, size: int = 2) -> list[str]:
    """Return the errors of all ranks, in the order of ranks."""
    distributed, texts = part(library, "distributed"), [""] * size

    def caught(group: Any) -> None:
        try:
            rank(group)
        except Exception as error:
            texts[group.rank] = f"{type(error).__name__}: {error}"
            raise

    try:
        distributed.run(caught, size=size, timeout=1)
    except Exception:
        return texts
    return texts


def _fails_on_rank_1(call: Any, number: int, source: Any) -> None:
    if call.group.rank == 1:
        raise OSError("a disk is full")


def faults_end_all_ranks(library: ModuleType) -> None:
    """Check the errors of all ranks if one rank raises, returns, or makes another call."""
    distributed = part(library, "distributed")

    def parallel(group: Any, **options: Any) -> Any:
        return distributed.ContextParallel(group, **{"seqlen": 16, "num_heads": 1, "block": 4} | options)

    def raises(group: Any) -> None:
        if group.rank:
            raise OSError("a disk is full")
        parallel(group)

    def raises_in_a_step(group: Any) -> None:
        x = np.ones((1, 8, 4), np.float32)
        parallel(group).attention(x, x, x)

    def differs(group: Any) -> None:
        parallel(group, causal=group.rank == 0)

    def calls_another(group: Any) -> None:
        cp, x = parallel(group), np.ones((1, 8, 4), np.float32)
        cp.unshard(x) if group.rank else cp.attention(x, x, x)

    def does_not_fit(group: Any) -> None:
        x = np.ones((1, 8 - group.rank, 4), np.float32)
        parallel(group).attention(x, x, x)

    closed = "PeerLost: rank 1 raised OSError: a disk is full. This group is closed: start the ranks again"
    assert _raised(library, raises) == [closed, "OSError: a disk is full"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part(library, "distributed._passes").RankCall, "do", _fails_on_rank_1)
        assert _raised(library, raises_in_a_step) == [closed, "OSError: a disk is full"]
    alike = "UnsupportedProblem: ranks must ask for the same call: rank 0"
    assert _raised(library, differs) == [f"{alike} has causal=True, rank 1 has causal=False"] * 2
    assert _raised(library, calls_another) == [f"{alike} asks for attention, rank 1 for unshard"] * 2
    first, second = _raised(library, does_not_fit)
    assert first == second and "rank 1: q must have the 8 rows of this rank (axis -2); got 7" in first


def _without_gradients(library: ModuleType, name: str) -> dict[str, Any]:
    return {each: x for each, x in _options(library)[name].items() if each != "wrt"}


def parts_are_rows_of_the_whole(library: ModuleType) -> None:
    """Check calls on parts of the queries and of the keys on the host."""
    for name in ("causal", "sequences", "dropout and a sink"):
        whole = cuflash.attention(Q, K, V, **_without_gradients(cuflash, name))
        for first in (7, 20, 40):
            rows = library.attention(Q[..., first:, :], K, V, q_start=first, **_without_gradients(library, name))
            np.testing.assert_allclose(rows, whole[..., first:, :], atol=1e-5)
    for mask_of in (lambda masks: masks.Band(-6, 2), lambda masks: masks.PrefixLM(23, "top_left")):
        whole, mask = cuflash.attention(Q, K, V, mask=mask_of(cuflash.masks)), mask_of(library.masks)
        q, parts = Q[..., 5:, :], []
        for keys in (slice(0, 18), slice(18, LENGTH)):
            k, v = K[..., keys, :], V[..., keys, :]
            parts.append(library.attention(q, k, v, mask=mask, q_start=5, kv_start=keys.start, return_lse=True))
        np.testing.assert_allclose(cuflash.merge(*zip(*parts))[0], whole[..., 5:, :], atol=1e-5)


def rectangles_are_those_of_elements(library: ModuleType) -> None:
    """Check the claims of a part's mask about rectangles against its elements."""
    room = part(library, "masks.places")
    for places in (room.Places(5, 18), room.Places(kv_start=7, q_runs=((3, 9), (20, 34)))):
        mask = room.Placed(library.masks.Band(-9, 2), places)
        dense = mask.toarray(20, 20)
        for i in range(0, 20, 4):
            for j in range(0, 20, 4):
                may, must = mask.rectangle(0, 0, i, i + 4, j, j + 4)
                allowed = dense[i : i + 4, j : j + 4]
                assert (may or not allowed.any()) and (not must or allowed.all())
        for i, j in np.ndindex(20, 20):
            assert mask.rectangle(0, 0, i, i + 1, j, j + 1) == (dense[i, j], dense[i, j])


def kernels_see_places(library: ModuleType) -> None:
    """Check a score function of positions in the simulator."""
    part(library, "compiler.source").KERNELS = source.KERNELS
    whole = cuflash.attention(Q, K, V, bias=TABLE)
    rows = library.attention(Q[..., 13:, :], K, V, bias=TABLE, q_start=13, executor="sim")
    np.testing.assert_allclose(rows, whole[..., 13:, :], atol=1e-5)


def kernels_draw_at_places(library: ModuleType) -> None:
    """Check the dropout of some heads, queries and keys of a longer sequence in the simulator."""
    part(library, "compiler.source").KERNELS = source.KERNELS
    whole = part(library, "masks.shape").MaskShape((2,), HEADS, LENGTH + 48, LENGTH + 16)
    places = part(library, "masks.places").Places(48, 16, 0, 3, of_all=whole)
    options = part(library, "planning.options").Options(
        dropout=library.Dropout(0.4, seed=5), executor="sim", kernel="simt", places=places
    )
    q, k, v = Q[:, 3:5], K[:, 3:5], V[:, 3:5]
    o, _ = part(library, "calls._call").planned(q, k, v, options).forward(q, k, v)
    dropout = cuflash.Dropout(0.4, seed=5)
    is_kept = dropout.keep((2, *whole[1:]))[:, 3:5, 48:, 16:]
    identity = np.broadcast_to(np.eye(LENGTH), (2, 2, LENGTH, LENGTH))
    p, _ = cuflash.reference.attention(q, k, identity)
    np.testing.assert_allclose(o, (p * is_kept / (1 - dropout.p)) @ v, atol=1e-4)


def masks_are_those_at_creation(library: ModuleType) -> None:
    """Check that ranks attend to the keys that their mask allowed when it was passed, since only these are moved."""
    elements = np.kron(np.eye(2, dtype=bool), np.ones((16, 16), bool))
    q, k, v = Q[0, :2, :32], K[0, :2, :32], V[0, :2, :32]
    pattern = library.masks.BlockPattern
    for kind in (np.array, scipy.sparse.csr_array, lambda held: pattern(held[::16, ::16].copy(), 16)):

        def rank(group: Any, kind: Any = kind) -> Any:
            mask = kind(elements)
            cp = part(library, "distributed").ContextParallel(
                group, seqlen=32, num_heads=2, mask=mask, block=16, layout="contiguous", method="gather"
            )
            if isinstance(mask, scipy.sparse.csr_array):
                mask.indices[...] = (mask.indices + 16) % 32
            else:
                getattr(mask, "blocks", mask)[...] = True
            return cp.unshard(cp.attention(*map(cp.shard, (q, k, v))))

        for o in part(library, "distributed").run(rank, size=2):
            assert_within_bounds(Example(q=q, k=k, v=v, mask=elements), o=o)


POSED, PASSES, STEPS, GROUP, THREADS, LANES, PROCESSES = (
    f"distributed/_{name}.py" for name in ("posed", "passes", "schedule", "group", "threads", "lanes", "processes")
)
PLACES, DRAWN = "masks/places.py", "planning/dropout_launches.py"
FAULTS = {
    masks_are_those_at_creation: {
        "a mask is read again after rows were dealt": Edit(
            "distributed/_parallel.py", "ContextParallel.__init__", "mask.to(deepcopy)", "mask"
        ),
        "an array is read again after rows were dealt": Edit(
            "distributed/_parallel.py", "ContextParallel.__init__", "deepcopy(mask)", "mask"
        ),
    },
    ranks_agree: {
        "queries start at 0": Edit(POSED, "Posed.part", "Places(start, 0, 0,", "Places(0, 0, 0,"),
        "queries are adjacent": Edit(POSED, "Posed.part", "runs if len(runs) > 1 else ()", "()"),
        "heads start at 0": Edit(POSED, "Posed.part", "0, 0, heads.start, runs", "0, 0, 0, runs"),
        "every group has the first sinks": Edit(
            POSED, "Posed.part", "sink[..., heads]", "sink[..., : heads.stop - heads.start]"
        ),
        "keys that some rows do not attend stay": Edit(
            "distributed/_layout.py", "Costs.needed", ".any(axis=0)", ".all(axis=0)"
        ),
        "all rows of a rank's keys are copied to the needed ones": Edit(
            POSED, "Posed.runs", "(self.keys.local(source, rows), rows) if", "(np.arange(len(rows)), rows) if"
        ),
        "gradients of other arrays are those of the first rank": Edit(
            PASSES, "_Backward.other_gradients", "range(1, group.size)", "()"
        ),
        "gradients of other arrays are those of the last group": Edit(
            PASSES, "_Backward.keep", "self.others.get(key, 0)", "0"
        ),
        "gradients of other arrays are those of one lane": Edit(
            PASSES, "_Backward.other_gradients", "own.get(name, 0)", "0"
        ),
        "gradients of a sink belong to the first heads": Edit(
            PASSES, "_Backward._of_all_heads", "whole[..., part.heads]", "whole[..., : dsink.shape[-1]]"
        ),
        "only the first rank's gradients of keys count": Edit(
            POSED, "Posed.returned_gradients", "for source in range(self.size):", "for source in range(1):"
        ),
        "gradients are added to the first rows": Edit(
            POSED, "Posed.returned_gradients", "table[self.keys.local(rank, rows), 1 + source]",
            "table[: len(rows), 1 + source]"
        ),
        "runs end where only the source's rows do": Edit(LANES, "joint_runs", " | (np.diff(target) != 1)", ""),
        "runs end where only the target's rows do": Edit(LANES, "joint_runs", "(np.diff(source) != 1) | ", ""),
        "rows of the first rank are those of all": Edit(
            PASSES, "Gather.routes", "self._places[self.steps[number].source]", "self._places[0]"
        ),
        "results of heads go to the first heads": Edit(
            POSED, "Posed._exchanged", "self.own_heads(of_heads)", "self.own_heads(0)"
        ),
        "rows are counted twice where runs meet": Edit(
            "distributed/_layout.py", "Rows.runs", "first + count", "first + count + 1"
        ),
        "random weights of a part are those of its own heads": Edit(
            "executors/tile_dropout.py", "TileDropout.of", "problem.whole_shape.num_heads", "1"
        ),
    },
    buffers_are_used_in_turn: {
        "keys are copied over those in use": Edit(
            STEPS, "gathering", "is_free = build.number(ATTEND, rank, rank, before)", "is_free = []"
        ),
        "gradients are written over those in use": Edit(STEPS, "gathering", "ranks if returns else ()", "()"),
        "a group is computed before its keys are there": Edit(STEPS, "gathering", "[*copied, *is_free", "[*is_free"),
        "gradients are taken before they are there": Edit(
            STEPS, "_return", "[*build.number(ATTEND, source, source, group), *is_free]", "is_free"
        ),
    },
    devices_agree: {
        "keys that no rank moves are not written": Edit(
            POSED, "Posed.own_keys", "np.concatenate(moved))", "np.concatenate(moved))[:0]"
        ),
        "own keys are those of other rows": Edit(
            POSED, "Posed.own_keys", "[np.r_[rows, absent], places]", "[np.r_[rows, absent], places // 2]"
        ),
        "copies start at the first row": Edit(
            LANES, "DeviceLanes.copier", "source[entry].data.ptr - theirs[start.name].data.ptr", "0"
        ),
        "rows are copied from the arrays of their target": Edit(
            LANES, "DeviceLanes.copier", "start_of_source[name] + begin", "start_of[name] + begin"
        ),
        "copies that are adjacent in the target alone are joined": Edit(
            LANES, "DeviceLanes.copier", "following[kind, at + height * pitches[0], begin + height * pitches[1]]",
            "following[kind, at + height * pitches[0], begin + width]",
        ),
        "kernels start at the first head": Edit(
            LANES, "CudaLanes._launching", "start_of[name] + offset", "start_of[name]"
        ),
        "received gradients are own ones": Edit(
            POSED, "Posed.returned_gradients", "rows if source == rank else received", "rows"
        ),
        "terms of keys are those of values": Edit(
            LANES, "CudaLanes.adder", "itertools.chain(*zip(*terms))", "itertools.chain(*zip(*terms[::-1]))"
        ),
    },
    bits_do_not_depend_on_the_order_of_arrival: {
        "gradients are added in the order of arrival": Edit(
            LANES, "HostLanes.adder", "enumerate(terms)", "enumerate(__import__('random').sample(terms, len(terms)))"
        ),
    },
    streams_wait_for_events: {
        "a copy does not wait for the array that it reads": Edit(
            STEPS, "program", "(step.rank, step.source if step.kind == COPY else step.rank)", "(step.rank,)"
        ),
        "steps do not wait for others": Edit(
            STEPS, "program", "Issue(n, steps[n], lane_of(steps[n])[1], tuple(waits)",
            "Issue(n, steps[n], lane_of(steps[n])[1], tuple(each for each in waits if each < 0)",
        ),
        "a lane counts as having waited for later steps": Edit(
            STEPS, "program", "known[lane, of_other] = place[other]", "known[lane, of_other] = len(steps)"
        ),
        "a call returns while others read": Edit(
            STEPS, "program", "ends[step.rank][lane] = ends[step.source][lane] = number",
            "ends[step.rank][lane] = number",
        ),
        "a rank does not wait for its own results": Edit(
            STEPS, "program", "known.get(((rank, 0), lane), -1) < place[n]", "lane[0] != rank"
        ),
        "a rank waits for the rows that it receives, but not for its second lane": Edit(
            STEPS, "program", "known.get(((rank, 0), lane), -1) < place[n]", "lane[1] == RECEIVING"
        ),
        "the second lane does not wait for the arrays of its rank": Edit(
            STEPS, "program", "if lane[1]:", "if lane[1] == RECEIVING:"
        ),
    },
    processes_agree: {
        "messages overlap": Edit(PROCESSES, "_parts", "first += _padded(array)", "first += 0"),
        "rows of this rank do not move": Edit(
            PROCESSES, "_Transfer.__init__", "if step.rank == step.source == rank:", "if step.source < 0:"
        ),
        "rows go to the rank that they come from": Edit(
            PROCESSES, "_Transfer.__init__", "sent[step.rank] +=", "sent[step.source] +="
        ),
        "a group is computed before its rows are there": Edit(
            PROCESSES, "ProcessGroup._run", "if needed is not None:", "if False:"
        ),
        "gradients are added before they are there": Edit(
            PROCESSES, "ProcessGroup._run", "COPY if kind == ATTEND else TAKE", "COPY"
        ),
        "results of heads are not waited for": Edit(
            PROCESSES, "ProcessGroup._run", "for transfer in started.values():", "for transfer in ():"
        ),
        "gradients move before they are computed": Edit(
            STEPS, "rounds", "[*early, (kind, group), *late]", "[*late, *early, (kind, group)]"
        ),
    },
    faults_end_all_processes: {
        "an exception in a block is not told": Edit(
            PROCESSES, "ProcessGroup.__exit__", "if error is not None and", "if error is None and"
        ),
        "an exception in a pass has no own sentence": Edit(
            PROCESSES, "ProcessGroup._close", "self._error = error", "self._error = ''"
        ),
        "silence is not noticed": Edit(
            PROCESSES, "ProcessGroup._silent_ranks", "silent.append(rank)", "pass"
        ),
        "each rank has its own sentence": Edit(
            PROCESSES, "ProcessGroup._close", "error = first.decode() or error", "error = f'{self.rank} {error}'"
        ),
        "a late rank is waited for": Edit(
            PROCESSES, "ProcessGroup._wait", "if now - start > self._timeout:", "if False:"
        ),
        "ranks that arrived are late": Edit(
            PROCESSES, "ProcessGroup._late", "if not self._store.check([key])", "if self._store.check([key])"
        ),
        "processes may make different calls": Edit(
            PROCESSES, "ProcessGroup.exchange", "refuse(call_reasons([name for name, _ in answers]))", "pass"
        ),
    },
    faults_end_all_ranks: {
        "a rank that raises is not noticed": Edit(
            THREADS, "run.work", 'meeting.close(f"rank {rank} raised {type(error).__name__}: {error}")', "pass"
        ),
        "ranks may have different options": Edit(
            "distributed/_agreement.py", "disagreement", "if text != calls[0].get(name):", "if False:"
        ),
        "ranks may make different calls": Edit(GROUP, "call_reasons", "if call != calls[0]", "if False"),
        "ranks with reasons do not refuse": Edit(
            "distributed/_agreement.py", "refusal", "if not any(of_ranks):", "if True:"
        ),
        "a closed group hides what all ranks refuse": Edit(
            THREADS, "_Meeting._wait", "while not (visit.is_over or visit.failures):",
            "while self.error or not (visit.is_over or visit.failures):"
        ),
        "the rank whose step raises does not see why": Edit(
            THREADS, "_Meeting.meet", "visit.failures.get(rank) or PeerLost(self.error)", "PeerLost(self.error)"
        ),
        "a refused call is computed": Edit(
            THREADS, "_Meeting.work", "refusal([offer for _, (*offer, _), _ in values])", "[]"
        ),
    },
    parts_are_rows_of_the_whole: {
        "a band has its place with the wrong sign": Edit(
            PLACES, "_placed", "places.q_start - places.kv_start", "places.kv_start - places.q_start"
        ),
        "intervals of keys start at 0": Edit(PLACES, "Placed.intervals", "bounds[1] - start", "bounds[1]"),
        "keys start at 0": Edit(PLACES, "Places.coordinates", "j + self.kv_start", "j"),
        "queries of the host start at 0": Edit(PLACES, "Places.queries", "return i + self.q_start", "return i"),
    },
    rectangles_are_those_of_elements: {
        "a rectangle ends at a key of the call": Edit(PLACES, "Placed.rectangle", "j1 + self.places.kv_start", "j1"),
        "a rectangle ends before its last query": Edit(PLACES, "Placed.rectangle", "last + 1", "last"),
        "queries past the last one are not clipped": Edit(
            PLACES, "Places.queries", "xp.clip(i, 0, len(positions) - 1)", "i % 6"
        ),
    },
    kernels_see_places: {
        "kernels exchange starts": Edit(
            "compiler/score_text.py", "Printer._position", "COORDINATES.index(op)", "COORDINATES.index(op) ^ 1"
        ),
        "kernels count from 0": Edit(
            "planning/score_launches.py", "_feature", "list(problem.places.starts)", "[0, 0, 0, 0]"
        ),
    },
    kernels_draw_at_places: {
        "kernels draw for queries from 0": Edit(DRAWN, "dropout_places", "query // 4", "0"),
        "kernels draw for keys from 0": Edit(DRAWN, "dropout_places", "key // 4", "0"),
        "kernels draw for heads from 0": Edit(DRAWN, "dropout_places", "batch * of_all.num_heads + head", "0"),
        "batch entries have the heads of the part": Edit(
            DRAWN, "dropout_places", '"num_heads_of_all": of_all.num_heads', '"num_heads_of_all": num_heads'
        ),
        "kernels do not know that they are placed": Edit(
            DRAWN, "pass_with_dropout", "dropout_is_placed=bool(places)", "dropout_is_placed=False"
        ),
    },
}  # fmt: skip
