"""What do tangents and second derivatives cost? Against plain attention, PyTorch's math attention and a Triton kernel.

    python -m experiments derivatives                               # 8192 tokens, 16 heads of 64 and of 128, bfloat16
    python -m experiments derivatives --head-dims 128 --seqlens 2048 --peers none
    python -m experiments derivatives --parts cpu                   # no GPU; the others need one, CuPy and PyTorch

"tangent" is o and o_dot along tangents of q, k and v: a forward pass and the pass jvp. "pass" is the pass jvp alone, "q
alone" and "k and v" the same with fewer tangents; "softcap" and "bias" the same with this score function, the bias with
a tangent of its own. "double backward" is the gradient of given gradients: the passes jvp and backward_jvp. A "penalty
step" in PyTorch computes gradients, and the gradients of the sum of the output and the squared gradients. Before a case
is timed, results of a small call are compared with their error bounds. Times are of the device's part of a call, in
turn with those of plain attention; the level-2 cache is written over before each. TFLOP/s count the products of a pass;
of_plain is the time over plain_ms: of plain attention's forward pass, for double backward of its backward pass, and
with a score function of the pass jvp without. PyTorch's math attention is differentiated by torch.func.jvp, and by
autograd twice; it stores matrices of scores. jvp_flash_attention, a Triton kernel, computes values with tangents. `rms`
is the root mean square of the errors of o_dot at 1024 tokens over that of o_dot, and `drift_rms` the same if k_dot is
nearly equal for all keys; both also for the peers.

Rows of the kernel "host" are times for which a warm call occupies the host, measured as in `host_time`. A call of
cuflash.torch looks for tangents: "look for tangents" is the number of these checks in a plain call times the time of
each. Rows of the kernel "cpu" are of NumPy arrays, float32: the passes jvp and backward_jvp, with the backward pass as
plain_ms. Their times are those of the fastest of several calls in turn.

Expect: a value and its tangents in at most 4.6 times the time of plain attention.
Found:  on an H200 at 128 columns 3.6 times as long without a mask and 3.7 times with a causal one, 3.4 and 3.6 times at
64 columns; by sm80's kernels 3.8 times their own; with an eighth of the blocks 1.5 times an eighth of the time.
A double backward takes 4.1 times plain attention's backward pass at 128 columns, and 4.0 times at 64. A
gradient penalty's step takes 14 ms, 28 ms by sm80's kernels, and 160 ms with PyTorch's math attention.
jvp_flash_attention takes 7.6 and 10.2 times as long as these calls at 128 columns. With softcap or a bias, the
pass jvp runs by sm80's kernels, 2.4 and 3.4 times as long as the plain pass. A call occupies the host for 63
us, and the look for tangents in PyTorch takes 0.2 us. On the host, the pass jvp takes 0.97 to 1.00 times as
long as the backward pass, and backward_jvp 1.8 to 2.1 times.

Cost: Three minutes of a GPU, and two minutes of two cores.
"""

import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash import masks
from cuflash.testing import Structure
from cuflash.testing.tangents import assert_tangents_within_bounds, with_tangents
from harness import Record, Timing, cases_on_gpu, check_names, gpu_versions, main, time_on_device
from rich.table import Table
from workloads import named_blocks, random_blocks, share_kept

PARTS, PEERS = ("gpu", "host", "cpu"), ("torch", "jvp_flash_attention", "none")
CHECKED_TOKENS = 1024  # of the call whose errors are compared
# Products of size n^2 d, by what is timed; the second derivatives are computed in two walks.
PRODUCTS = {
    "tangent": 7, "pass": 5, "q alone": 3, "k and v": 4, "softcap": 5, "bias": 5, "double backward": 20,
    "penalty step": 32,
}  # fmt: skip
PLAIN = {"double backward": "backward", "softcap": "pass", "bias": "pass"}  # what is plain; else the forward pass
SCORES = ("softcap", "bias")
CAP = 30.0
HOST_TOKENS, HOST_HEADS, HOST_COLUMNS = 256, 16, 64  # those of `host_time`
CPU_TOKENS, CPU_HEADS = 2048, 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    parts: tuple[str, ...] = PARTS
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = ("full", "causal", "blocks128_0.125")
    seqlens: tuple[int, ...] = (8192,)
    ways: tuple[str, ...] = tuple(PRODUCTS)
    num_heads: int = 16
    repeats: int = 15
    peers: tuple[str, ...] = ("torch", "jvp_flash_attention")
    kernel: str = "auto"
    host_calls: int = 2000

    def __post_init__(self) -> None:
        check_names(self, {"parts": PARTS, "ways": PRODUCTS, "peers": PEERS})
        if min(self.num_heads, self.repeats, self.host_calls, *self.head_dims, *self.seqlens) < 1:
            raise ValueError("lengths, dims, repeats and calls must be positive")
        for mask, seqlen in product(self.masks, self.seqlens):
            share_kept(mask, seqlen)  # refuses unknown names, and blocks that do not fit


def mask_of(name: str, num_heads: int, seqlen: int) -> cuflash.masks.Mask | None:
    """Return a mask by its name; a list of random blocks covers the last tokens of a length that they do not divide."""
    blocks = named_blocks(name)
    if blocks is not None:
        return masks.BlockPattern(random_blocks(num_heads, -(-seqlen // blocks[0]) * blocks[0], *blocks), blocks[0])
    return masks.Causal() if name == "causal" else None


def check(config: Config, head_dim: int, mask: str, score: str = "") -> float:
    """Return the largest ratio of an error of o_dot or lse_dot to its bound, in a small call.

    Raises
    ------
    AssertionError
        The ratio exceeds 1.
    """
    import cupy

    structure = Structure(num_heads=2, seqlen_q=300, seqlen_kv=300, head_dim=head_dim, value_dim=head_dim,
                          dtype="bfloat16")  # fmt: skip
    shown = mask_of(mask if named_blocks(mask) is None else "blocks128_0.5", 2, 300)
    example = structure.example().but(product_dtype=np.dtype(ml_dtypes.bfloat16), mask=shown)
    kinds, options = dict.fromkeys("qkv", "normal"), dict[str, Any]()
    if score == "softcap":
        example, options = example.but(score=cuflash.scores.softcap(CAP)), {"softcap": CAP}
    elif score == "bias":
        bias = np.random.default_rng(1).standard_normal((2, 300, 300)).astype(ml_dtypes.bfloat16)
        example, kinds["bias"] = example.but(score=cuflash.scores.bias(bias)), "normal"
        options = {"bias": cupy.asarray(bias)}
    moving = with_tangents(example, kinds)
    if score == "bias":
        options["tangents"] = {"bias": cupy.asarray(moving.tangents["bias"])}
    arrays = [cupy.asarray(x) for x in (example.q, example.k, example.v, *(moving.tangents[name] for name in "qkv"))]
    options |= {"mask": shown, "kernel": config.kernel, "return_lse": True}
    _, (o_dot, lse_dot) = cuflash.attention_jvp(*arrays, **options)
    return assert_tangents_within_bounds(moving, o_dot=o_dot.get(), lse_dot=lse_dot.get())


def tensors_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arrays of bfloat16 as tensors with a batch axis, in the same memory."""
    import torch

    return {name: torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)[None] for name, x in arrays.items()}


def penalty_step(attend: Callable[..., Any], qkv: tuple[Any, ...], do: Any) -> Callable[[], Any]:
    """Return a step of a gradient penalty: the gradients of sum(do * o) plus the squares of its gradients."""
    import torch

    def step() -> Any:
        o = attend(*qkv)
        gradients = torch.autograd.grad(o, qkv, do, create_graph=True)
        penalty = sum(each.square().sum(dtype=torch.float32) for each in gradients)
        return torch.autograd.grad((o, penalty), qkv, (do, torch.ones_like(penalty)))

    return step


def calls_of_torch(arrays: dict[str, Any], causal: bool) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's math attention with a tangent, and its second derivatives if there is a do."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    tensors = tensors_of(arrays)
    qkv = tuple(tensors[name].clone().requires_grad_() for name in "qkv")
    dots = tuple(tensors[f"{name}_dot"] for name in "qkv")

    def attend(*operands: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*operands, is_causal=causal)

    def push() -> Any:
        with torch.no_grad():
            return torch.func.jvp(attend, tuple(x.detach() for x in qkv), dots)

    if "do" not in tensors:
        return {"tangent": push}
    do = tensors["do"].clone().requires_grad_()
    gradients = torch.autograd.grad(attend(*qkv), qkv, do, create_graph=True)
    return {
        "tangent": push,
        "double backward": lambda: torch.autograd.grad(gradients, (*qkv, do), dots, retain_graph=True),
        "penalty step": penalty_step(attend, qkv, tensors["do"]),
    }


def calls_of_triton(arrays: dict[str, Any], causal: bool) -> dict[str, Callable[[], Any]]:
    """Return the call of jvp_flash_attention with tangents."""
    import torch
    from jvp_flash_attention.jvp_attention import JVPAttn
    from torch.autograd import forward_ad

    tensors = tensors_of(arrays)

    def push() -> Any:
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(tensors[name], tensors[f"{name}_dot"]) for name in "qkv"]
            return forward_ad.unpack_dual(JVPAttn.fwd_dual(*duals, causal=causal))

    return {"tangent": push}


CALLS_OF_PEERS = {"torch": calls_of_torch, "jvp_flash_attention": calls_of_triton}


def calls_of_peers(config: Config, arrays: dict[str, Any], causal: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls of each peer that is installed and runs, after a first call; name others on standard error."""
    peers = {}
    for name in config.peers:
        try:
            if name != "none":
                peers[name] = CALLS_OF_PEERS[name](arrays, causal)
                for call in peers[name].values():
                    call()
        except Exception as error:  # of any kind: the peers' own
            peers.pop(name, None)
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
    return peers


def errors(config: Config, head_dim: int, mask: str) -> Record:
    """Return the relative RMS errors of o_dot, by implementation, for random tangents and for keys that drift alike."""
    import cupy

    causal, rows = mask == "causal", Record()
    # jvp_flash_attention reads as many heads of k and v as of q.
    structure = Structure(num_heads=2, num_kv_heads=2, seqlen_q=CHECKED_TOKENS, seqlen_kv=CHECKED_TOKENS,
                          head_dim=head_dim, value_dim=head_dim, dtype="bfloat16")  # fmt: skip
    example = structure.example().but(mask=cuflash.masks.Causal()) if causal else structure.example()
    for prefix, of_keys in (("", "normal"), ("drift_", "drift")):
        moving = with_tangents(example, {"q": "normal", "k": of_keys, "v": "normal"}, seed=1)
        exact = np.asarray(moving.exact.o_dot, np.float64)
        own = {name: getattr(example, name) for name in "qkv"}
        own |= {f"{name}_dot": x for name, x in moving.tangents.items()}
        arrays = {name: cupy.asarray(x).reshape(x.shape[-3:]) for name, x in own.items()}
        qkv, dots = ([arrays[f"{name}{dot}"] for name in "qkv"] for dot in ("", "_dot"))
        _, o_dot = cuflash.attention_jvp(*qkv, *dots, causal=causal, kernel=config.kernel)
        results = {f"{prefix}rms": o_dot.get().astype(np.float64)}
        for name, calls in calls_of_peers(config, arrays, causal).items():
            results[f"{name}_{prefix}rms"] = calls["tangent"]()[1].double().cpu().numpy()
        for name, result in results.items():
            error = result.reshape(exact.shape) - exact
            rows[name] = float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))
    return rows


def calls_of_plan(config: Config, arrays: dict[str, Any], mask: str) -> tuple[str, dict[str, Callable[[], object]]]:
    """Return the family of the pass jvp, and the calls of a case, with plain attention's passes."""
    qkv, dots = ([arrays[f"{name}{dot}"] for name in "qkv"] for dot in ("", "_dot"))
    shown = mask_of(mask, *qkv[0].shape[:2])
    plan = cuflash.plan(*qkv, mask=shown, kernel=config.kernel, tangents=("q", "k", "v"))
    o, lse = plan.forward(*qkv)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: plan.forward(*qkv),
        "backward": lambda: plan.backward(arrays["do"], *qkv, o, lse),
        "tangent": lambda: plan.jvp(*qkv, *plan.forward(*qkv), *dots),
        "pass": lambda: plan.jvp(*qkv, o, lse, *dots),
        "q alone": lambda: plan.jvp(*qkv, o, lse, dots[0]),
        "k and v": lambda: plan.jvp(*qkv, o, lse, None, *dots[1:]),
    }
    if "backward_jvp" in plan._plan.passes:
        calls["double backward"] = lambda: plan.backward_jvp(
            arrays["do"], *qkv, o, lse, *plan.jvp(*qkv, o, lse, *dots), *dots
        )
    if "penalty step" in config.ways:
        from cuflash.torch import attention

        def attend(*tensors: Any) -> Any:
            return attention(*tensors, mask=shown, kernel=config.kernel)

        tensors = tensors_of(arrays)
        calls["penalty step"] = penalty_step(
            attend, tuple(tensors[name].requires_grad_() for name in "qkv"), tensors["do"]
        )
    return plan._plan.specs["jvp"].family, calls


def call_with_score(
    config: Config, arrays: dict[str, Any], mask: str, score: str
) -> tuple[str, Callable[[], object]]:
    """Return the family and the call of the pass jvp with a score function; a bias and its tangent differ by head."""
    import cupy

    qkv, dots = ([arrays[f"{name}{dot}"] for name in "qkv"] for dot in ("", "_dot"))
    options: dict[str, Any] = {"mask": mask_of(mask, *qkv[0].shape[:2]), "kernel": config.kernel}
    operands, tangents = dict[str, Any](), dict[str, Any]()
    if score == "bias":
        drawn = np.random.default_rng(1).standard_normal((2, *[qkv[0].shape[1]] * 2), np.float32)
        bias, bias_dot = (
            cupy.stack([cupy.roll(one, head, axis=0) for head in range(len(qkv[0]))])
            for one in map(cupy.asarray, drawn.astype(ml_dtypes.bfloat16).view(np.int16))
        )
        operands, tangents = {"bias": bias.view(qkv[0].dtype)}, {"bias": bias_dot.view(qkv[0].dtype)}
    else:
        options["softcap"] = CAP
    plan = cuflash.plan(*qkv, **options, **operands, tangents=("q", "k", "v", *tangents))
    o, lse = plan.forward(*qkv, **operands)
    return plan._plan.specs["jvp"].family, lambda: plan.jvp(*qkv, o, lse, *dots, tangents, **operands)


def row(kernel: str, mask: str, way: str, sizes: tuple[int, int, int], ours: Timing, plain: Timing) -> Record:
    """Return a row; `sizes` are the tokens, the number of heads and their columns."""
    seqlen, num_heads, head_dim = sizes
    floating = 2 * PRODUCTS.get(way, 0) * seqlen**2 * head_dim * num_heads * share_kept(mask, seqlen)
    return {
        "kernel": kernel, "mask": mask, "way": way, "seqlen": seqlen, "num_heads": num_heads, "head_dim": head_dim,
        "ms": ours.median_ms, "spread_ms": ours.spread_ms, "tflops": floating / ours.median_ms / 1e9 or "",
        "plain_ms": plain.median_ms, "of_plain": ours.median_ms / plain.median_ms,
    }  # fmt: skip


def measured(config: Config, head_dim: int, mask: str, seqlen: int) -> Iterator[Record]:
    """Yield the rows of one case."""
    import cupy

    scores = [name for name in SCORES if name in config.ways]
    ratios = {name: check(config, head_dim, mask, name) for name in ("", *scores)}
    rng = np.random.default_rng(0)
    names = ("q", "k", "v", "do", "q_dot", "k_dot", "v_dot")
    drawn = rng.standard_normal((len(names), config.num_heads, seqlen, head_dim), np.float32)
    arrays = dict(zip(names, map(cupy.asarray, drawn.astype(ml_dtypes.bfloat16))))
    family, calls = calls_of_plan(config, arrays, mask)
    families = dict.fromkeys(calls, family)
    for name in scores:
        families[name], calls[name] = call_with_score(config, arrays, mask, name)
    needed = {"forward", *config.ways, *(PLAIN[way] for way in config.ways if way in PLAIN)}
    calls = {name: call for name, call in calls.items() if name in needed}
    peers = {} if named_blocks(mask) else calls_of_peers(config, arrays, mask == "causal")
    timed = calls | {f"{peer} {way}": call for peer, of in peers.items() for way, call in of.items() if way in calls}
    timings = time_on_device(timed, repeats=config.repeats)
    for way in (name for name in PRODUCTS if name in config.ways and name in calls):
        of_peers = {f"{name}_ms": timings.get(f"{name} {way}") for name in CALLS_OF_PEERS}
        sizes, plain = (seqlen, config.num_heads, head_dim), timings[PLAIN.get(way, "forward")]
        has_errors = way == "tangent" and not named_blocks(mask)
        yield {
            **row(families[way], mask, way, sizes, timings[way], plain),
            **{name: "" if peer is None else peer.median_ms for name, peer in of_peers.items()},
            "of_bound": ratios[way if way in ratios else ""],
            **(errors(config, head_dim, mask) if has_errors else {}), **gpu_versions(),
        }  # fmt: skip
    calls.clear()
    peers.clear()
    cupy.get_default_memory_pool().free_all_blocks()


def on_host(config: Config) -> Iterator[Record]:
    """Yield the times for which warm calls occupy the host."""
    import cupy
    import host_time
    import torch
    from cuflash.torch import attention as attention_in_torch

    inputs = host_time.Inputs(HOST_TOKENS, cupy.asarray)
    tensors = [tuple(torch.from_dlpack(x) for x in place) for place in inputs.places]
    sizes = HOST_TOKENS, HOST_HEADS, HOST_COLUMNS

    def timing(places: list[Any], call: Callable[..., Any]) -> Timing:
        case = host_time.Case("", "", lambda turn, mask: places[turn], call)
        times = host_time.timed(
            case, lambda turn: None, cupy.cuda.runtime.deviceSynchronize, host_time.empty_launch(), config.host_calls, 5
        )
        return Timing(*(float(us) / 1e3 for us in (times["us"], float(times["high_us"]) - float(times["low_us"]))),
                      times["calls"])  # fmt: skip

    plain = timing(inputs.places, lambda q, k, v, do: cuflash.attention(q, k, v))
    pushed = timing(inputs.places, lambda q, k, v, do: cuflash.attention_jvp(q, k, v, do, k, v))
    of_torch = timing(tensors, lambda q, k, v, do: attention_in_torch(q, k, v))
    checks = cost_of_checks(lambda: attention_in_torch(*tensors[0][:3]))
    for way, ours, of in (
        ("attention", plain, plain), ("attention_jvp", pushed, plain), ("attention in PyTorch", of_torch, of_torch),
        ("look for tangents", Timing(checks, 0.0, 1), of_torch),
    ):  # fmt: skip
        yield row("host", "full", way, sizes, ours, of) | gpu_versions()


def cost_of_checks(call: Callable[[], Any]) -> float:
    """Return the milliseconds in which a call checks whether its tensors have tangents: checks times time of each."""
    from cuflash.layouts import has_dual_level
    from torch._C import _are_functorch_transforms_active as is_transforming

    counts = Counter[str]()

    def see(frame: Any, event: str, argument: Any) -> None:
        counts["dual"] += event == "call" and frame.f_code is has_dual_level.__code__
        counts["transforms"] += event == "c_call" and argument.__name__ == is_transforming.__name__

    call()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    seconds = {
        name: min(timeit.repeat(each, number=10_000, repeat=9)) / 10_000
        for name, each in (("dual", has_dual_level), ("transforms", is_transforming))
    }
    return 1e3 * sum(counts[name] * each for name, each in seconds.items())


def on_cpu(config: Config) -> Iterator[Record]:
    """Yield the times of the passes on NumPy arrays, over that of the backward pass; each of its fastest call."""
    for head_dim, mask in product(config.head_dims, config.masks):
        shape = CPU_HEADS, CPU_TOKENS, head_dim
        q, k, v, do, *dots = np.random.default_rng(0).standard_normal((7, *shape), np.float32)
        plan = cuflash.plan(q, k, v, mask=mask_of(mask, *shape[:2]), tangents=("q", "k", "v"))
        o, lse = plan.forward(q, k, v)
        results = plan.jvp(q, k, v, o, lse, *dots)
        calls: dict[str, Callable[[], object]] = {
            "backward": lambda: plan.backward(do, q, k, v, o, lse),
            "pass": lambda: plan.jvp(q, k, v, o, lse, *dots),
            "backward_jvp": lambda: plan.backward_jvp(do, q, k, v, o, lse, *results, *dots),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _, (name, call) in product(range(config.repeats), calls.items()):
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
        fastest = {
            name: Timing(1e3 * min(each), 1e3 * (np.median(each) - min(each)), config.repeats)
            for name, each in seconds.items()
        }
        for way in ("pass", "backward_jvp"):
            yield row("cpu", mask, way, (CPU_TOKENS, CPU_HEADS, head_dim), fastest[way], fastest["backward"])


def run(config: Config) -> Iterator[Record]:
    """Yield the rows of each part: those of a GPU for each head_dim, mask, length and measurement."""
    if {"gpu", "host"} & set(config.parts):
        for head_dim, mask, seqlen in cases_on_gpu(config.head_dims, config.masks, config.seqlens):
            if "gpu" in config.parts:
                yield from measured(config, head_dim, mask, seqlen)
    if "host" in config.parts:
        yield from on_host(config)
    if "cpu" in config.parts:
        yield from on_cpu(config)


def table(records: list[Record]) -> Table:
    names = [f"{name}_ms" for name in CALLS_OF_PEERS] + ["rms", "torch_rms", "jvp_flash_attention_rms"]
    shown = Table("columns", "mask", "tokens", "what", "kernel", "ms", "TFLOP/s", "of plain", *names)
    for record in records:
        shown.add_row(
            str(record["head_dim"]), record["mask"], str(record["seqlen"]), record["way"], record["kernel"],
            f"{record['ms']:.3f}", f"{record['tflops'] or 0:.0f}", f"{record['of_plain']:.2f}",
            *(f"{record[name]:.3g}" if record.get(name, "") != "" else "" for name in names),
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "kernel", "mask", "way", "seqlen", "num_heads", "head_dim"))
