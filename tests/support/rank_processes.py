"""Ranks as processes of PyTorch, over gloo or NCCL, for tests: what each of them returns or raises, and when."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from queue import Empty
from typing import Any, NamedTuple

BEAT, SILENCE = 0.2, 2.0  # seconds, shorter than those of the library


class Outcome(NamedTuple):
    """The value that a rank returned, or the text of its exception, and its seconds since all ranks were connected."""

    value: Any
    error: str
    seconds: float


def _rank(
    number: int, size: int, port: int, backend: str, timeout: float, function: Any, arguments: Any, outcomes: Any
) -> None:  # fmt: skip
    import torch
    from cuflash.distributed import _processes, group_of
    from torch import distributed as dist

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    torch.set_num_threads(1)
    if backend == "nccl":
        import cupy

        torch.cuda.set_device(number)
        cupy.cuda.Device(number).use()
    _processes.BEAT, _processes.SILENCE = BEAT, SILENCE
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group(backend, store=store, rank=number, world_size=size)
    dist.barrier()
    start, value, error = time.monotonic(), None, ""
    try:
        value = function(group_of(timeout=timeout), *arguments)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    outcomes.put((number, Outcome(value, error, time.monotonic() - start)))
    outcomes.close()
    outcomes.join_thread()
    os._exit(0)  # peers that are lost leave connections that PyTorch would wait for


def run(
    function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 30.0, backend: str = "gloo"
) -> list[Outcome | None]:
    """Return the outcome of each rank of a function of a group and of arguments; None for a rank that died.

    With the backend "nccl", each rank has the GPU of its number.
    """
    from torch import distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")  # which imports these modules once
    context.set_forkserver_preload(["torch.distributed", "cuflash.torch", "cuflash.distributed._processes"])
    outcomes: Any = context.Queue()
    processes = [
        context.Process(
            target=_rank, args=(n, size, store.port, backend, timeout, function, arguments, outcomes), daemon=True
        )
        for n in range(size)
    ]  # fmt: skip
    for process in processes:
        process.start()
    results: list[Outcome | None] = [None] * size
    deadline, missing = time.monotonic() + 120, set(range(size))
    try:
        while missing and time.monotonic() < deadline:
            is_dead = {n for n in missing if not processes[n].is_alive()}
            try:
                while True:
                    number, outcome = outcomes.get(timeout=0.1)
                    results[number] = outcome
                    missing.discard(number)
            except Empty:
                missing -= is_dead
        assert not missing, f"ranks {sorted(missing)} hang"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results
