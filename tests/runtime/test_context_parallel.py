"""Context parallelism over processes: the rows of one call, its gradients, and processes that fail."""

import os
import signal
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rank_processes  # noqa: E402
from cuflash.distributed import ContextParallel as OfArrays  # noqa: E402
from cuflash.distributed import Machine, PeerLost, _passes, _posed, group_of  # noqa: E402
from cuflash.distributed._lanes import device_count  # noqa: E402
from cuflash.testing import assert_within  # noqa: E402

import cuflash  # noqa: E402
import cuflash.torch  # noqa: E402
from cuflash import Dropout, UnsupportedProblem, distributed, masks, scores  # noqa: E402

HEADS, LENGTH = 4, 77
CASES = {
    "causal": {"causal": True},
    "a window and a sink": {"window": (20, 3), "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    "documents": {"mask": masks.Sequences([0, 9, 40, LENGTH], causal=True), "batch": (2,), "num_kv_heads": 2},
    "heads": {"causal": True, "method": "heads"},
    "alibi in bfloat16": {"score": scores.alibi(scores.alibi_slopes(HEADS)), "causal": True, "dtype": "bfloat16"},
    "dropout in float64": {"dropout": Dropout(0.25, seed=3), "dtype": "float64", "layout": "zigzag"},
}
LAYOUT = ("batch", "num_kv_heads", "method", "layout")


def tensors_of(case):
    generator = torch.Generator().manual_seed(0)
    batch, dtype = case.get("batch", ()), getattr(torch, case.get("dtype", "float32"))
    heads = {"q": HEADS, "k": case.get("num_kv_heads", HEADS), "v": case.get("num_kv_heads", HEADS), "do": HEADS}
    return {
        name: torch.randn(*batch, count, LENGTH, 16, generator=generator).to(dtype) for name, count in heads.items()
    }


def options_of(case):
    return {name: each for name, each in case.items() if name not in (*LAYOUT, "dtype")}


def parallel(group, case, **more):
    layout = {name: case[name] for name in LAYOUT if name in case}
    layout = {"method": "gather", "block": 8} | layout
    return cuflash.torch.ContextParallel(group, seqlen=LENGTH, num_heads=HEADS, **layout, **options_of(case), **more)


def as_numbers(tensors):
    return {name: each.detach().double().cpu().numpy() for name, each in tensors.items()}


def all_cases(group, cases):
    """Return the results of all rows for each case, half of them in several groups of heads."""
    results = {}
    for number, (name, case) in enumerate(cases.items()):
        _posed.TYPICAL = Machine(launch=0.0 if number % 2 == 0 else 5e-6)
        device = "cpu" if group._is_on_host else f"cuda:{group.rank}"
        q, k, v, do = (x.to(device) for x in tensors_of(case).values())
        cp = parallel(group, case)
        q, k, v = (cp.shard(x).requires_grad_() for x in (q, k, v))
        o, lse = cp.attention(q, k, v, return_lse=True)
        ((cp.shard(do) * o).sum() + lse.sum()).backward()
        rows = {"o": o, "lse": lse[..., None], "dq": q.grad, "dk": k.grad, "dv": v.grad}
        results[name] = as_numbers({each: cp.unshard(x) for each, x in rows.items()})
    return results


def expected(case):
    q, k, v, do = (torch_to_numpy(x) for x in tensors_of(case).values())
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options_of(case))
    gradients = vjp(do, np.ones_like(lse))
    results = {"o": o, "lse": lse[..., None], "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    return {name: each.astype(np.float64) for name, each in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_agree_with_one_call(size):
    check(rank_processes.run(all_cases, size, CASES), CASES)


ON_GPUS = {
    name: case | {"dtype": "float16"} for name, case in CASES.items() if case.get("dtype", "float32") == "float32"
}


@pytest.mark.gpu
@pytest.mark.slow
def test_processes_with_a_gpu_each_agree_with_one_call():
    """NCCL moves the rows."""
    if device_count() < 2:
        pytest.skip("needs two GPUs")
    check(rank_processes.run(all_cases, 2, ON_GPUS, timeout=60.0, backend="nccl"), ON_GPUS)


def check(ranks, cases):
    """Compare the results of all ranks with those of one call on the host."""
    assert [each.error for each in ranks] == [""] * len(ranks)
    for name, case in cases.items():
        exact = expected(case)
        arrays = [torch_to_numpy(each) for each in tensors_of(case).values()]
        dlse = np.ones(arrays[0].shape[:-1], "float64" if case.get("dtype") == "float64" else "float32")
        product_dtype = "float16" if cases is ON_GPUS else None  # tensor cores multiply rounded weights
        bound = cuflash.error_bound(*arrays, dlse=dlse, product_dtype=product_dtype, **options_of(case))
        for outcome in ranks:
            for each, wanted in exact.items():
                of_rows = getattr(bound, each)
                within = 2 * (of_rows[..., None] if each == "lse" else of_rows)
                assert_within(f"{each} of {name}", outcome.value[name][each], wanted, within)
                if case.get("method") == "heads" and cases is CASES:
                    assert np.array_equal(outcome.value[name][each], wanted)


def torch_to_numpy(tensor):
    from cuflash.layouts import taken

    return taken("x", tensor, np)


def of_arrays(group):
    """Return what NumPy arrays give, and what ranks told each other."""
    q, k, v, do = (torch_to_numpy(x) for x in tensors_of({}).values())
    cp = OfArrays(group, seqlen=LENGTH, num_heads=HEADS, causal=True, block=8, method="gather")
    o, vjp = cp.attention_vjp(cp.shard(q), cp.shard(k), cp.shard(v))
    assert group_of() is group
    return cp.unshard(o), cp.unshard(vjp(cp.shard(do)).dk), group.exchange("a sum", group.rank)


@pytest.mark.slow
def test_processes_compute_with_numpy_arrays_too():
    ranks = rank_processes.run(of_arrays, 2)
    q, k, v, do = (torch_to_numpy(x) for x in tensors_of({}).values())
    o, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    for outcome in ranks:
        assert not outcome.error
        np.testing.assert_allclose(outcome.value[0], o, atol=1e-5)
        np.testing.assert_allclose(outcome.value[1], vjp(do).dk, atol=1e-4)
        assert outcome.value[2] == [0, 1]


def disagree(group):
    """Return the sentences of refusals, after each of which the group is used again."""
    sentences = []

    def refused(call):
        with pytest.raises(UnsupportedProblem) as error:
            call()
        sentences.append(error.value.reasons)

    is_last = group.rank == group.size - 1
    refused(lambda: parallel(group, {"causal": not is_last}))
    cp = parallel(group, {"causal": True})
    q, k, v = (cp.shard(x) for x in list(tensors_of({}).values())[:3])
    refused(lambda: cp.attention(q[:, :-1] if is_last else q, k, v))
    refused(lambda: cp.attention(q, k, v.double() if is_last else v))
    refused(lambda: cp.unshard(q) if is_last else cp.attention(q, k, v))
    refused(lambda: cp.attention(q.to_sparse(), k, v))
    refused(lambda: cp.shard(q[..., :3, :]))
    refused(lambda: parallel(group, {}, sink=torch.zeros(HEADS, requires_grad=True)))
    o = cp.attention(*(x.requires_grad_() for x in (q, k, v)))
    (dq,) = torch.autograd.grad((o * o).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
    return sentences, tuple(cp.unshard(o).shape)


def test_pullbacks_take_arrays_only():
    def rank(group):
        cp = cuflash.torch.ContextParallel(group, seqlen=6, num_heads=2, block=1)
        x = cp.shard(torch.ones(2, 6, 4))
        with pytest.raises(UnsupportedProblem, match="k must be an array; got a tensor: call attention, which PyTorch"):
            cp.attention_vjp(x.numpy(), x, x.numpy())

    distributed.run(rank, size=2, timeout=20)


@pytest.mark.slow
def test_processes_that_disagree_are_refused_and_go_on():
    first, *others = rank_processes.run(disagree, 3)
    assert not first.error
    assert all(each.value == first.value for each in others)
    sentences, shape = first.value
    assert shape == (HEADS, LENGTH, 16)
    wanted = (
        "ranks must ask for the same call: rank 0 has causal=True, rank 2 has causal=False",
        "rank 2: q must have the 32 rows of this rank",
        "rank 2: q, k and v must share one dtype",
        "ranks must ask for the same call: rank 0 asks for attention, rank 2 for unshard",
        "q must be a dense tensor", "x must be an array with 77 rows", "sink must not require gradients",
    )  # fmt: skip
    assert len(sentences) == len(wanted)
    for start, (reason,) in zip(wanted, sentences):
        assert reason.startswith(start)


def fails(group, how):
    """Compute in several groups of heads; the last rank but one fails in the second call."""
    _posed.TYPICAL = Machine(launch=0.0)
    cp = parallel(group, {"causal": True})
    q, k, v = (cp.shard(x) for x in list(tensors_of({}).values())[:3])
    cp.attention(q, k, v)
    if group.rank != group.size - 2:
        time.sleep(0.1)
    elif how == "raises in a block":
        with group:
            raise OSError("a disk is full")
    elif how == "raises in a pass":
        _passes.RankCall.do = raises
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "is killed in a pass":
        _passes.RankCall.do = killed
    elif how == "sleeps":
        time.sleep(5)
    cp.attention(q, k, v)


def raises(call, number, source):
    raise OSError("a disk is full")


def killed(call, number, source):
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "raises in a block": (2, 5.0, "rank 0 raised OSError: a disk is full"),
    "raises in a pass": (3, 5.0, "rank 1 raised OSError: a disk is full"),
    "is killed": (3, 10.0, "rank 1 stopped answering, "),
    "is killed in a pass": (3, 10.0, "rank 1 stopped answering, "),
    "sleeps": (3, 10.0, "rank 1 did not arrive at attention, where ranks 0, 2 waited, within 2 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FAULTS)
def test_a_process_that_fails_ends_the_others_with_one_sentence(how):
    size, seconds, sentence = FAULTS[how]
    outcomes = rank_processes.run(fails, size, how, timeout=2.0 if how == "sleeps" else 30.0)
    others = [each for n, each in enumerate(outcomes) if n != size - 2]
    for each in others:
        assert each.error.startswith(f"{PeerLost.__name__}: {sentence}"), each
        assert each.error.endswith("This group is closed: start the ranks again")
        assert each.error == others[0].error
        assert each.seconds < seconds
    failed = outcomes[size - 2]
    assert (failed is None) == ("killed" in how)


def test_a_group_needs_a_process_group():
    with pytest.raises(UnsupportedProblem, match="call torch.distributed.init_process_group"):
        group_of()
    with pytest.raises(UnsupportedProblem, match="timeout must be a positive number"):
        group_of(timeout=0)
