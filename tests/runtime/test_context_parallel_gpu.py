"""Context parallelism of threads with a GPU each, which may be the same: against one call on one GPU."""

from types import SimpleNamespace

import cupy_machine
import numpy as np
import pytest
from cuflash.distributed import ContextParallel, Machine, PeerLost, _lanes, _posed, run
from cuflash.distributed import _processes as processes
from cuflash.distributed._lanes import CudaLanes, DeviceLanes, Move, Region
from cuflash.distributed._schedule import ATTEND, COPY, RECEIVING, Step, program
from cuflash.testing import assert_within
from executors import needs_compiler

import cuflash
import ranks_of_a_store
from cuflash import Dropout, UnsupportedProblem, masks, scores

HEADS, LENGTH = 4, 500
OPTIONS = {
    "causal": {"causal": True},
    "a window and a sink": {"window": (90, 0), "sink": np.linspace(-1, 1, HEADS, dtype=np.float32), "wrt": "sink"},
    "documents": {"mask": masks.Sequences([0, 70, 300, LENGTH], causal=True), "batch": (2,)},
    "lists": {"mask": masks.BlockPattern(np.random.default_rng(0).random((8, 8)) < 0.5, 64), "num_kv_heads": 2},
    "dropout": {"dropout": Dropout(0.25, seed=3), "causal": True},
    "alibi": {"score": scores.alibi(scores.alibi_slopes(HEADS)), "causal": True},
}
OF_LAYOUT = ("batch", "num_kv_heads")


def arrays_of(options, dtype):
    rng = np.random.default_rng(1)
    batch, kv_heads = options.get("batch", ()), options.get("num_kv_heads", HEADS)
    counts = {"q": HEADS, "k": kv_heads, "v": kv_heads, "do": HEADS}
    return {
        name: rng.standard_normal((*batch, count, LENGTH, 64)).astype(dtype) for name, count in counts.items()
    }


def on_gpus(devices, arrays, options, **how):
    """Return the results of all rows on the host, which the first rank has."""
    import cupy

    q, k, v, do = arrays.values()

    def rank(group):
        cp = ContextParallel(group, seqlen=LENGTH, num_heads=HEADS, block=32, **how, **options)
        with cupy.cuda.Stream(non_blocking=True) as stream:  # ranks that share a GPU must not share its null stream
            q_, k_, v_, do_ = (cupy.asarray(cp.shard(x)) for x in (q, k, v, do))
            for _ in range(3):  # later calls are bound, and reuse memory
                (o, lse), vjp = cp.attention_vjp(q_, k_, v_, return_lse=True)
                gradients = vjp(do_)
            rows = {"o": o, "lse": lse[..., None], "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
            whole = {name: cupy.asnumpy(cp.unshard(x)) for name, x in rows.items()}
            whole |= {f"d{name}": cupy.asnumpy(gradients[name]) for name in gradients.others}
            stream.synchronize()
        return whole | {"lse": whole["lse"][..., 0]}

    return run(rank, devices=devices, timeout=30)


def check(devices, name, dtype, **how):
    import cupy

    options = OPTIONS[name]
    arrays, posed = arrays_of(options, dtype), {each: x for each, x in options.items() if each not in OF_LAYOUT}
    bound = cuflash.error_bound(*arrays.values(), **posed)
    sent = {"sink": cupy.asarray(posed["sink"])} if "sink" in posed else {}
    if name == "documents":
        sent["mask"] = posed["mask"].to(cupy.asarray)
    q, k, v, do = map(cupy.asarray, arrays.values())
    score = posed.get("score")
    if score is not None:  # whose kernels take adjacent queries only
        how["layout"] = "contiguous"
        sent["score"] = score._with_arrays({each: cupy.asarray(x) for each, x in score.arrays.items()})
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **posed | sent)
    gradients = vjp(do)
    exact = {"o": o, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    exact |= {f"d{each}": gradients[each] for each in gradients.others}
    ranks = on_gpus(devices, arrays, options, **how)
    for results in ranks:
        for each, wanted in exact.items():
            of_name = bound.others[each[1:]] if each[1:] in bound.others else getattr(bound, each)
            assert_within(f"{each} of {name}", results[each], cupy.asnumpy(wanted), 2 * of_name)
            assert np.array_equal(results[each], ranks[0][each])
    return ranks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_that_share_a_gpu_agree_with_one_call(name, dtype):
    check([0, 0], name, dtype, method="gather")


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [[0, 0, 0], [0, 0, 0, 0]])
def test_more_ranks_and_other_layouts(devices):
    first = check(devices, "causal", "float16", method="gather", layout="zigzag")
    again = check(devices, "causal", "float16", method="gather", layout="zigzag")
    assert all(np.array_equal(first[name], again[name]) for name in ("o", "lse", "dk", "dv"))


@pytest.mark.gpu
def test_one_rank_takes_masks_of_the_host():
    check([0], "documents", "float16")


@pytest.mark.gpu
def test_exchanged_heads_agree_with_one_call():
    check([0, 0], "causal", "float16", method="heads")
    check([0, 0, 0, 0], "documents", "float16", method="heads")


@pytest.mark.gpu
@pytest.mark.slow
def test_ranks_on_all_gpus_agree_with_one_call():
    if _lanes.device_count() < 2:
        pytest.skip("needs two GPUs")
    devices = range(_lanes.device_count())
    for name in OPTIONS:
        check(devices, name, "float16", method="gather")
    check(devices[:2], "causal", "float16", method="heads")


@pytest.mark.gpu
def test_a_rank_that_raises_ends_the_others_and_the_gpu_stays_usable():
    import cupy

    errors = []

    def rank(group):
        cp = ContextParallel(group, seqlen=LENGTH, num_heads=HEADS, block=32, causal=True, method="gather")
        q = cupy.asarray(cp.shard(np.ones((HEADS, LENGTH, 64), np.float16)))
        cp.attention(q, q, q)
        if group.rank == 1:
            raise OSError("a disk is full")
        try:
            cp.attention(q, q, q)
        except PeerLost as error:
            errors.append(str(error))
            raise

    with pytest.raises(OSError, match="a disk is full"):
        run(rank, devices=[0, 0], timeout=20)
    assert errors == ["rank 1 raised OSError: a disk is full. This group is closed: start the ranks again"]
    assert float(cupy.arange(4).sum()) == 6


@pytest.mark.gpu
def test_host_arrays_are_refused_on_every_rank():
    def rank(group):
        cp = ContextParallel(group, seqlen=LENGTH, num_heads=HEADS)
        q = cp.shard(np.ones((HEADS, LENGTH, 64), np.float16))
        cp.attention(q, q, q)

    with pytest.raises(UnsupportedProblem, match="q must be a CuPy array, as this rank computes with them"):
        run(rank, devices=[0, 0])


# Without a GPU


@pytest.fixture
def machine(monkeypatch, tmp_path):
    with cupy_machine.installed(monkeypatch, tmp_path) as double:
        double.copies = cupy_machine.copies_at_once(double)
        yield double


def moved(machine, move, source, target):
    """Return the array to which rows move: on the host without a machine, otherwise on its device."""
    lanes = _lanes.HostLanes() if machine is None else DeviceLanes(0, [0, 1])
    arrays = {"source": source, "target": target.copy()}
    if machine is not None:
        arrays = {name: machine.asarray(each) for name, each in arrays.items()}
    holder = SimpleNamespace(arrays=arrays, addresses=_lanes.Addresses(arrays))
    lanes.copier([(move, Region("target"), Region("source"))], arrays, arrays)(holder, holder)
    return arrays["target"] if machine is None else arrays["target"].get()


def test_copies_move_rows_of_heads(machine):
    rng = np.random.default_rng(0)
    source, target = rng.standard_normal((2, 5, 20, 8)), np.zeros((2, 3, 30, 8))
    move = Move("k", slice(2, 4), slice(1, 3), ((0, 10, 4), (6, 2, 3), (19, 29, 1)))
    assert np.array_equal(moved(machine, move, source, target), moved(None, move, source, target))
    assert len(machine.copies) == 6  # of two batch entries and three runs, for both heads at once
    assert ("access", 0, 1) in machine.log


@needs_compiler
@pytest.mark.parametrize("method", ["gather", "heads"])
@pytest.mark.parametrize("wrt", [(), "sink"])
def test_ranks_of_a_stand_in_agree_with_one_call(machine, monkeypatch, method, wrt):
    """Kernels run in the simulator, and copies are done at once; the second call launches what the first one bound."""
    monkeypatch.setattr(_posed, "TYPICAL", Machine(launch=0.0))
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 40, 16), dtype=np.float32)
    sink = np.linspace(-1, 1, 2, dtype=np.float32)

    def rank(group):
        options = {"causal": True, "sink": sink, "wrt": wrt, "kernel": "simt"}
        cp = ContextParallel(group, seqlen=40, num_heads=2, block=8, method=method, **options)
        assert machine.device == group.rank
        q_, k_, v_, do_ = (machine.asarray(cp.shard(x)) for x in (q, k, v, do))
        for _ in range(2):
            o, vjp = cp.attention_vjp(q_.copy(), k_.copy(), v_.copy())
            gradients = vjp(do_)
        whole = [cp.unshard(x).get() for x in (o, gradients.dq, gradients.dk, gradients.dv)]
        (prepared,) = cp._known.values()
        assert set(prepared.tasks) == {"forward", ("backward", False)}
        return whole + [gradients[name].get() for name in gradients.others]

    o, vjp = cuflash.attention_vjp(q, k, v, causal=True, sink=sink, wrt=wrt)
    gradients = vjp(do)
    exact = o, *gradients, *gradients.others.values()
    for results in run(rank, devices=[0, 1], timeout=60):
        assert len(results) == len(exact)
        for mine, wanted in zip(results, exact):
            np.testing.assert_allclose(mine, wanted, atol=2e-5)


@needs_compiler
def test_processes_with_device_arrays_agree_with_one_call(machine, monkeypatch):
    """Threads stand in for processes, and kernels run in the simulator."""
    monkeypatch.setattr(_posed, "TYPICAL", Machine(launch=0.0))
    monkeypatch.setattr(processes, "HostLanes", CudaLanes)
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 40, 16), dtype=np.float32)
    o, vjp = cuflash.attention_vjp(q, k, v, window=(9, 0))
    exact = o, *vjp(do)

    def rank(group):
        cp = ContextParallel(group, seqlen=40, num_heads=2, block=8, method="gather", window=(9, 0), kernel="simt")
        q_, k_, v_, do_ = (machine.asarray(cp.shard(x)) for x in (q, k, v, do))
        for _ in range(2):
            o, vjp = cp.attention_vjp(q_, k_, v_)
            gradients = vjp(do_)
        return [cp.unshard(x).get() for x in (o, *gradients)]

    for results in ranks_of_a_store.run(processes, 2, rank):
        for mine, wanted in zip(results, exact):
            np.testing.assert_allclose(mine, wanted, atol=2e-5)


@pytest.mark.parametrize(("method", "launch"), [("gather", 0.0), ("gather", 5e-6), ("heads", 0.0)])
def test_a_rank_needs_half_of_the_arrays_of_one_gpu_and_what_the_formula_says(machine, monkeypatch, method, launch):
    """The formula is that of the rank that needs the most; kernels need their own workspaces besides."""
    monkeypatch.setattr(_posed, "TYPICAL", Machine(launch=launch))
    machine.runs_kernels = False
    heads, kv_heads, rows, dim = 8, 4, 2048, 64
    formulas, kernels, before = [], [], machine.live_bytes

    def rank(group):
        cp = ContextParallel(
            group, seqlen=rows, num_heads=heads, num_kv_heads=kv_heads, causal=True, block=64, method=method
        )
        own = {"q": heads, "k": kv_heads, "v": kv_heads, "do": heads}
        q, k, v, do = (machine.empty((count, len(cp.rows), dim), np.float16) for count in own.values())
        for _ in range(2):
            o, vjp = cp.attention_vjp(q, k, v)
            gradients = vjp(do)
        formulas.append(cp.workspace_bytes(dim, "float16"))
        (prepared,) = cp._known.values()
        kernels.append(max(plan.workspace_bytes for part in prepared.parts for _, plan in part.plans))
        return gradients

    run(rank, devices=[0, 1], timeout=60)
    row = 2 * dim * 2
    arrays = rows * heads * (2 * row + 4) + rows * kv_heads * 2 * row  # q, do, o, dq and lse, and k, v, dk and dv
    peak = machine.most_bytes - before
    assert arrays + 0.85 * sum(formulas) <= peak <= arrays + sum(formulas) + 2 * sum(kernels)


def test_steps_wait_for_events_on_their_stream(machine):
    """Only events that another stream waits for are recorded, and each pass records the same ones once more."""
    lanes, copy = DeviceLanes(0, [0, 0]), Step(COPY, 0, 1, 0)
    attend, later, other = Step(ATTEND, 0, 0, 0, (0,)), Step(COPY, 0, 1, 1, (1,)), Step(ATTEND, 0, 0, 1, (2,))
    (((_, issued),), (ends, _)) = program([copy, attend, later, other], 2)
    logs, current = [], []
    work = SimpleNamespace(do=lambda number, source: current.append(machine.stream.ptr))
    for _ in range(2):
        machine.log.clear()
        start = lanes.start()
        events = {-1: start, -2: start}
        for issue in issued:
            events[issue.number] = lanes.run(issue, events, [work, None])
        lanes.finish([events[number] for number in ends])
        logs.append(list(machine.log))
    second_lane, copies = (lanes._streams[lane].ptr for lane in (1, RECEIVING))
    first, second, third, fourth = (lanes._events[number].number for number in range(4))
    assert logs[0] == logs[1] == [
        ("record", 0, start.number),
        ("wait", copies, start.number), ("wait", copies, start.number), ("record", copies, first),
        ("wait", 0, first), ("record", 0, second),
        ("wait", copies, second), ("record", copies, third),
        ("wait", second_lane, start.number), ("wait", second_lane, third), ("record", second_lane, fourth),
        ("wait", 0, third), ("wait", 0, fourth),
    ]  # fmt: skip
    assert current == 2 * [0, 0, 0, second_lane], "memory that a step allocates belongs to the stream of its kernels"


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"devices": [0, 7]}, "devices must be numbers of GPUs of this machine, which has"),
    ({"devices": []}, "devices must be a list of the numbers of GPUs"),
    ({"devices": 2}, "devices must be a list of the numbers of GPUs; got 2"),
    ({"devices": [0], "size": 1}, "size must be left out with devices"),
    ({}, "size must be an int of at least 1, or devices the GPUs; got None"),
])  # fmt: skip
def test_wrong_devices_are_refused(arguments, sentence):
    with pytest.raises(UnsupportedProblem, match=sentence):
        run(lambda group: None, **arguments)
