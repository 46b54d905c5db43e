"""PyTorch's context_parallel on several GPUs: `scaling` starts this script, which prints a JSON object for each row.

    python experiments/support/context_parallel_peer.py RANKS SEQLENS HEAD_DIM REPEATS

Causal attention of 16 heads in float16, on one GPU and on all, by each backend that runs; the fastest is printed. What
rank 0 does is on stderr, with the seconds since the start. PyTorch is imported once, before the ranks are forked: its
import takes longer than the calls. After `LIMIT` seconds, each rank prints where it is, and ends.

Cost: At most a minute of the GPUs.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
from statistics import median
from typing import Any

HEADS = 16
LIMIT = 60.0  # seconds
START = time.monotonic()


def rank(number: int, ranks: int, seqlens: list[int], head_dim: int, repeats: int, file: str) -> None:
    """Time calls of one rank; rank 0 prints the rows."""
    import torch
    import torch.nn.functional as functional
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def say(what: str) -> None:
        if number == 0:
            print(f"{time.monotonic() - START:5.1f} s {what}", file=sys.stderr, flush=True)

    faulthandler.dump_traceback_later(LIMIT - (time.monotonic() - START), exit=True)
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", number)
    say("PyTorch is imported")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=number, world_size=ranks, device_id=device)
    mesh = init_device_mesh("cuda", (ranks,))
    dist.barrier()
    say("ranks are connected")

    def seconds(call: Any) -> float:
        times = []
        for turn in range(repeats + 2):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            if turn > 1:
                times.append(time.perf_counter() - start)
        return median(times)

    for seqlen in seqlens:
        rows: list[tuple[float, dict[str, Any]]] = []
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            generator = torch.Generator("cuda").manual_seed(0)
            q, k, v = (
                torch.randn(1, HEADS, seqlen, head_dim, device="cuda", dtype=torch.float16, generator=generator)
                for _ in range(3)
            )

            def forward(*arrays: Any) -> Any:
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(*arrays, is_causal=True)

            def both(*arrays: Any) -> None:
                o = forward(*arrays)
                torch.autograd.grad(o, arrays, torch.ones_like(o))

            def timed(q: Any, k: Any, v: Any) -> dict[str, float]:
                own = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                with torch.no_grad():
                    alone = seconds(lambda: forward(*own))
                return {"forward": alone, "both": seconds(lambda: both(*own))}

            try:
                one = timed(q, k, v)
                say(f"{backend.name} at {seqlen}: one GPU is timed")
                with context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)):
                    together = timed(q, k, v)
                say(f"{backend.name} at {seqlen}: all GPUs are timed")
            except Exception as error:
                print(f"{backend.name} at {seqlen}: {type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
                continue
            for name, each in together.items():
                row = {
                    "seqlen": seqlen, "pass": name, "method": backend.name.lower(), "one_ms": 1e3 * one[name],
                    "ranks_ms": 1e3 * each, "linear": one[name] / each / ranks, "torch": torch.__version__,
                }  # fmt: skip
                rows.append((each, row))
        for name in ("forward", "both"):
            of_pass = [each for each in rows if each[1]["pass"] == name]
            if number == 0 and of_pass:
                print(json.dumps(min(of_pass, key=lambda each: each[0])[1]), flush=True)
    say("all rows are printed")
    os._exit(0)  # PyTorch would wait for its connections


def main() -> None:
    import torch.distributed.tensor.experimental  # noqa: F401

    ranks, seqlens, head_dim, repeats = sys.argv[1:]
    lengths = [int(each) for each in seqlens.split(",")]
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = int(ranks), lengths, int(head_dim), int(repeats), f"{folder}/store"
        processes = [forked.Process(target=rank, args=(number, *arguments)) for number in range(int(ranks))]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
