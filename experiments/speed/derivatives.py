"""What do tangents and second derivatives cost? Against plain attention, PyTorch's math attention and a Triton kernel.

    python -m experiments derivatives                               # 8192 tokens, 16 heads of 64 and of 128, bfloat16
    python -m experiments derivatives --head-dims 128 --seqlens 2048 --peers none

Needs an NVIDIA GPU and CuPy, and PyTorch for the peers. "tangent" is o and o_dot along tangents of q, k and v: a
forward pass and the pass jvp. "pass" is the pass jvp alone, "q alone" the same with a tangent of q alone. "double
backward" is the gradient of given gradients: the passes jvp and backward_jvp. Before a case is timed, results of a
small call are compared with their error bounds. Times are of the device's part of a call, in turn with those of plain
attention; the level-2 cache is written over before each. TFLOP/s count the products of a pass; of_plain is the time
over that of plain attention: of its forward pass, and for double backward of its backward pass. PyTorch's math
attention is differentiated by torch.func.jvp, and by autograd twice; it stores matrices of scores. jvp_flash_attention,
a Triton kernel, computes values with tangents. `rms` is the root mean square of the errors of o_dot at 1024 tokens over
that of o_dot, and `drift_rms` the same if k_dot is nearly equal for all keys; both also for the peers.

Expect: a value and its tangents in at most 4.6 times the time of plain attention.
Found:  on an H200 at 128 columns 3.6 times as long without a mask and 3.7 times with a causal one, 3.4 and 3.6 times at
64 columns; by sm80's kernels 6.1 times. A double backward takes 4.3 and 4.1 times plain attention's backward pass at
128 columns, and 4.0 times at 64. jvp_flash_attention takes 7.7 and 10.2 times as long as these calls at 128 columns.

Cost: Two minutes of a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cuflash
import ml_dtypes
import numpy as np
from cuflash.testing import Structure
from cuflash.testing.tangents import assert_tangents_within_bounds, with_tangents
from harness import Record, cases_on_gpu, check_names, gpu_versions, main, time_on_device
from rich.table import Table
from workloads import share_kept

MASKS, PEERS = ("full", "causal"), ("torch", "jvp_flash_attention", "none")
CHECKED_TOKENS = 1024  # of the call whose errors are compared
# Products of size n^2 d, by what is timed; the second derivatives are computed in two walks.
PRODUCTS = {"tangent": 7, "pass": 5, "q alone": 3, "double backward": 20}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration; the defaults are those of the published run."""

    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = MASKS
    seqlens: tuple[int, ...] = (8192,)
    num_heads: int = 16
    repeats: int = 15
    peers: tuple[str, ...] = ("torch", "jvp_flash_attention")
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_names(self, {"masks": MASKS, "peers": PEERS})
        if min(self.num_heads, self.repeats, *self.head_dims, *self.seqlens) < 1:
            raise ValueError("lengths, dims and repeats must be positive")


def check(config: Config, head_dim: int, mask: str) -> float:
    """Return the largest ratio of an error of o_dot or lse_dot to its bound, in a small call.

    Raises
    ------
    AssertionError
        The ratio exceeds 1.
    """
    import cupy

    structure = Structure(num_heads=2, seqlen_q=300, seqlen_kv=300, head_dim=head_dim, value_dim=head_dim,
                          dtype="bfloat16")  # fmt: skip
    example = structure.example().but(product_dtype=np.dtype(ml_dtypes.bfloat16))
    example = example.but(mask=cuflash.masks.Causal()) if mask == "causal" else example
    moving = with_tangents(example, dict.fromkeys("qkv", "normal"))
    arrays = [cupy.asarray(x) for x in (example.q, example.k, example.v, *(moving.tangents[name] for name in "qkv"))]
    options: dict[str, Any] = {"causal": mask == "causal", "kernel": config.kernel, "return_lse": True}
    _, (o_dot, lse_dot) = cuflash.attention_jvp(*arrays, **options)
    return assert_tangents_within_bounds(moving, o_dot=o_dot.get(), lse_dot=lse_dot.get())


def tensors_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arrays of bfloat16 as tensors with a batch axis, in the same memory."""
    import torch

    return {name: torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)[None] for name, x in arrays.items()}


def calls_of_torch(arrays: dict[str, Any], causal: bool) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's math attention with a tangent, and its double backward if there is a do."""
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
    structure = Structure(num_heads=2, seqlen_q=CHECKED_TOKENS, seqlen_kv=CHECKED_TOKENS, head_dim=head_dim,
                          value_dim=head_dim, dtype="bfloat16")  # fmt: skip
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


def measured(config: Config, head_dim: int, mask: str, seqlen: int) -> Iterator[Record]:
    """Yield the rows of one case."""
    import cupy

    ratio, causal = check(config, head_dim, mask), mask == "causal"
    rng = np.random.default_rng(0)
    names = ("q", "k", "v", "do", "q_dot", "k_dot", "v_dot")
    drawn = rng.standard_normal((len(names), config.num_heads, seqlen, head_dim), np.float32)
    arrays = dict(zip(names, map(cupy.asarray, drawn.astype(ml_dtypes.bfloat16))))
    qkv, dots = ([arrays[f"{name}{dot}"] for name in "qkv"] for dot in ("", "_dot"))
    plan = cuflash.plan(*qkv, causal=causal, kernel=config.kernel, tangents=("q", "k", "v"))
    o, lse = plan.forward(*qkv)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: plan.forward(*qkv),
        "backward": lambda: plan.backward(arrays["do"], *qkv, o, lse),
        "tangent": lambda: plan.jvp(*qkv, *plan.forward(*qkv), *dots),
        "pass": lambda: plan.jvp(*qkv, o, lse, *dots),
        "q alone": lambda: plan.jvp(*qkv, o, lse, dots[0]),
    }
    if "backward_jvp" in plan._plan.passes:
        calls["double backward"] = lambda: plan.backward_jvp(
            arrays["do"], *qkv, o, lse, *plan.jvp(*qkv, o, lse, *dots), *dots
        )
    peers = calls_of_peers(config, arrays, causal)
    timed = calls | {f"{peer} {way}": call for peer, of in peers.items() for way, call in of.items() if way in calls}
    timings = time_on_device(timed, repeats=config.repeats)
    for way in (name for name in PRODUCTS if name in calls):
        plain = timings["backward" if way == "double backward" else "forward"]
        ours, of_peers = timings[way], {name: timings.get(f"{name} {way}") for name in CALLS_OF_PEERS}
        floating = 2 * PRODUCTS[way] * seqlen**2 * head_dim * config.num_heads * share_kept(mask, seqlen)
        yield {
            "kernel": plan._plan.specs["jvp"].family, "mask": mask, "way": way, "seqlen": seqlen,
            "num_heads": config.num_heads, "head_dim": head_dim, "ms": ours.median_ms, "spread_ms": ours.spread_ms,
            "tflops": floating / ours.median_ms / 1e9, "plain_ms": plain.median_ms,
            "of_plain": ours.median_ms / plain.median_ms,
            **{f"{name}_ms": "" if peer is None else peer.median_ms for name, peer in of_peers.items()},
            "of_bound": ratio, **(errors(config, head_dim, mask) if way == "tangent" else {}), **gpu_versions(),
        }  # fmt: skip
    cupy.get_default_memory_pool().free_all_blocks()


def run(config: Config) -> Iterator[Record]:
    """Yield one row for each head_dim, mask, length and measurement."""
    for head_dim, mask, seqlen in cases_on_gpu(config.head_dims, config.masks, config.seqlens):
        yield from measured(config, head_dim, mask, seqlen)


def table(records: list[Record]) -> Table:
    names = [f"{name}_ms" for name in CALLS_OF_PEERS] + ["rms", "torch_rms", "jvp_flash_attention_rms"]
    shown = Table("columns", "mask", "tokens", "what", "kernel", "ms", "TFLOP/s", "of plain", *names)
    for record in records:
        shown.add_row(
            str(record["head_dim"]), record["mask"], str(record["seqlen"]), record["way"], record["kernel"],
            f"{record['ms']:.3f}", f"{record['tflops']:.0f}", f"{record['of_plain']:.2f}",
            *(f"{record[name]:.3g}" if record.get(name, "") != "" else "" for name in names),
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main(Config, run, table, replacing=("gpu", "kernel", "mask", "way", "seqlen", "num_heads", "head_dim"))
