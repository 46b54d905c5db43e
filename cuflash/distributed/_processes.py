"""Ranks as processes: a PyTorch process group moves their arrays, and its store has the values that they exchange."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from ..arrays import Array
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords
from ._agreement import refusal
from ._group import Group, PeerLost, Work, call_reasons, listed, timeout_reasons
from ._lanes import CudaLanes, HostLanes
from ._schedule import ATTEND, COPY, TAKE, Step, rounds

BEAT = 1.0  # seconds between two heartbeats of a rank
SILENCE = 5.0  # seconds without a heartbeat after which a rank counts as lost
_LONGEST_NAP = 0.01  # maximum seconds between two checks of the store
_ALIGNMENT = 16  # alignment in bytes of each array in a message

_groups: dict[str, tuple[Any, ProcessGroup]] = {}
_lock = threading.Lock()


@explains_keywords
def group_of(process_group: Any = None, *, timeout: float = 60.0) -> Group:
    """Return the group for a PyTorch process group; later calls return the same object.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        Default: all processes. Its backend moves the arrays: gloo those on the host, NCCL those on GPUs.
    timeout : float
        Seconds that a rank waits for the others before it raises `PeerLost`; later calls do not change it.

    Returns
    -------
    Group
        The group. In a ``with`` block, an exception that leaves the block ends the other ranks at once; without a
        block, they notice within seconds that the process has ended.

    Raises
    ------
    UnsupportedProblem
        The timeout is not a positive number of seconds, `torch.distributed` is not initialized, or this process is not
        in the process group.

    Examples
    --------
    >>> import torch.distributed                                    # doctest: +SKIP
    >>> torch.distributed.init_process_group("gloo")                # doctest: +SKIP
    >>> with distributed.group_of() as group:                       # doctest: +SKIP
    ...     group.exchange("a sum", group.rank)
    [0, 1]
    """
    refuse(timeout_reasons(timeout))
    try:
        from torch import distributed as dist
    except ImportError as error:
        raise UnsupportedProblem([f"group_of needs PyTorch, which is missing ({error}): install torch"]) from error
    if not (dist.is_available() and dist.is_initialized()):
        raise UnsupportedProblem(["torch.distributed must be initialized: call torch.distributed.init_process_group"])
    process_group = dist.group.WORLD if process_group is None else process_group
    if dist.get_rank(process_group) < 0:
        raise UnsupportedProblem(["process_group must contain this process; got a group of other processes"])
    with _lock:
        name = str(process_group.group_name)
        known = _groups.get(name)
        if known is None or known[0] is not process_group:
            known = _groups[name] = process_group, ProcessGroup(process_group, float(timeout))
        return known[1]


class ProcessGroup(Group):
    """The group of a rank that is a process.

    Ranks write the values that they exchange, and a heartbeat every second, to the store of the process group. The
    arrays of each group of heads move in one exchange between all ranks, which runs while the rank computes.
    """

    def __init__(self, process_group: Any, timeout: float) -> None:
        from torch import distributed as dist

        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._process_group, self._timeout = process_group, timeout
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"cuflash/{process_group.group_name}", store)
        self._is_on_gpu = dist.get_backend(process_group) == "nccl"
        self._lanes = CudaLanes() if self._is_on_gpu else HostLanes()
        self._number = 0
        self._beats: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of each rank, and its time
        self._error = ""
        threading.Thread(target=self._beat, daemon=True, name="cuflash ranks").start()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not isinstance(error, PeerLost):
            self._close(f"rank {self.rank} raised {type(error).__name__}: {error}")

    # Values that ranks exchange

    def exchange(self, what: str, value: Any) -> list[Any]:
        number, self._number = self._number, self._number + 1
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        self._require_open(what)
        self._at_store(lambda: self._store.set(keys[self.rank], json.dumps((what, value))), what)
        self._wait(lambda: bool(self._at_store(lambda: self._store.check(keys), what)), what, lambda: self._late(keys))
        answers = [json.loads(each) for each in self._at_store(lambda: self._store.multi_get(keys), what)]
        if number > 1:  # all ranks have read the values of exchange number - 2
            with suppress(Exception):
                self._store.delete_key(f"{number - 2}/{self.rank}")
        refuse(call_reasons([name for name, _ in answers]))
        return [each for _, each in answers]

    def _late(self, keys: list[str]) -> list[int]:
        """Return the ranks whose keys are missing."""
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _wait(self, is_over: Callable[[], bool], what: str, late: Callable[[], list[int]]) -> None:
        """Wait until a condition holds; close the group if another rank is lost, or the timeout has passed.

        Raises
        ------
        PeerLost
            The group is closed.
        """
        start, nap, looked = time.monotonic(), 1e-5, time.monotonic()
        while not is_over():
            now = time.monotonic()
            if now - looked > BEAT / 4:
                looked = now
                self._require_open(what)
                self._require_peers(what, now - start)
                if now - start > self._timeout:
                    self._give_up(what, late())
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _give_up(self, what: str, late: list[int]) -> None:
        came = listed([rank for rank in range(self.size) if rank not in late])
        lost = listed(late) if late else "a rank"
        self._fail(f"{lost} did not arrive at {what}, where {came} waited, within {self._timeout:g} s")

    def _require_open(self, what: str) -> None:
        """Raise `PeerLost` if a rank has closed the group."""
        if not self._error and self._at_store(lambda: self._store.check(["error"]), what):
            self._error = self._at_store(lambda: self._store.get("error"), what).decode()
        if self._error:
            raise PeerLost(self._error)

    def _require_peers(self, what: str, seconds: float) -> None:
        """Close the group if a rank's heartbeat has stopped."""
        lost = self._silent_ranks(what)
        if lost:
            self._fail(f"{listed(lost)} stopped answering, {seconds:.0f} s into {what}")

    def _silent_ranks(self, what: str) -> list[int]:
        """Return the ranks without a heartbeat during the last `SILENCE` seconds."""
        now, silent = time.monotonic(), list[int]()
        for rank in range(self.size):
            key = f"beat/{rank}"
            is_set = self._at_store(lambda: self._store.check([key]), what)
            beat = self._at_store(lambda: self._store.get(key), what) if is_set else b""
            last, since = self._beats.get(rank, (None, now))
            if beat != last:
                self._beats[rank] = beat, now
            elif now - since > SILENCE and rank != self.rank:
                silent.append(rank)
        return silent

    def _fail(self, error: str) -> None:
        self._close(error)
        raise PeerLost(self._error)

    def _close(self, error: str) -> None:
        """Close the group for a reason; only the first reason counts."""
        if self._error:
            return
        with suppress(Exception):  # the store itself may be lost
            first = self._store.compare_set("error", "", error)
            error = first.decode() or error
        self._error = error

    def _at_store(self, do: Callable[[], Any], what: str) -> Any:
        """Call a function that uses the store, and return its result.

        Raises
        ------
        PeerLost
            The store does not answer.
        """
        try:
            return do()
        except Exception as error:
            self._error = self._error or f"the store of the process group did not answer in {what}"
            raise PeerLost(self._error) from error

    def _beat(self) -> None:
        """Write a heartbeat of this rank every second, until the store has ended."""
        with suppress(Exception):
            for number in range(1 << 62):
                self._store.set(f"beat/{self.rank}", str(number))
                time.sleep(BEAT)

    # Movement of arrays

    def _perform(self, what: str, texts: Mapping[str, str], reasons: Sequence[str], work: Work | None = None) -> None:
        refuse(refusal(self.exchange(what, (reasons, texts))))
        if work is not None:
            self._run(what, work)

    def _run(self, what: str, work: Work) -> None:
        """Run the steps in rounds, which all ranks start in the same order; an error of a rank closes the group."""
        started = dict[tuple[str, int], _Transfer]()
        self._lanes.start()
        try:
            for kind, group in rounds(work.steps):
                steps = {n: step for n, step in enumerate(work.steps) if step.kind == kind and step.group == group}
                if kind in (COPY, TAKE):
                    started[kind, group] = _Transfer(self, what, steps, work)
                    continue
                needed = started.pop((COPY if kind == ATTEND else TAKE, group), None)
                if needed is not None:
                    needed.finish()
                for number, step in steps.items():
                    if step.rank == self.rank:
                        work.do(number, work)
            for transfer in started.values():
                transfer.finish()
        except PeerLost:
            raise
        except BaseException as error:
            self._close(f"rank {self.rank} raised {type(error).__name__}: {error}")
            raise

    def _exchange_bytes(self, received: Array, sent: Array, of_received: list[int], of_sent: list[int]) -> Any:
        """Start to send parts of an array to all ranks and to receive theirs; return the handle of the transfer."""
        from torch import distributed as dist

        with self._stream():
            tensors = _tensor(received), _tensor(sent)
            return dist.all_to_all_single(*tensors, of_received, of_sent, group=self._process_group, async_op=True)

    def _await(self, handle: Any, what: str) -> None:
        """Wait until a transfer is over: on a GPU the stream waits, else the process.

        Raises
        ------
        PeerLost
            A rank is lost, or the timeout has passed.
        """
        if self._is_on_gpu:
            with self._stream():
                handle.wait()
            return
        self._wait(handle.is_completed, f"the exchange of arrays in {what}", lambda: [])
        try:
            handle.wait()
        except RuntimeError as error:  # a connection is lost; heartbeats show to which rank
            start = time.monotonic()
            with suppress(PeerLost):
                while time.monotonic() - start < 2 * SILENCE:
                    self._require_open(what)
                    self._require_peers(what, time.monotonic() - start)
                    time.sleep(BEAT / 4)
                self._close(f"the connection of rank {self.rank} to another rank was lost in {what}")
            raise PeerLost(self._error) from error

    def _stream(self) -> Any:
        """Return a context in which PyTorch's current stream is CuPy's."""
        if not self._is_on_gpu:
            return nullcontext()
        import torch

        address = self._lanes.namespace.cuda.get_current_stream().ptr
        # ExternalStream(0) would be a stream of PyTorch's pool
        return torch.cuda.stream(torch.cuda.ExternalStream(address) if address else torch.cuda.default_stream())


class _Transfer:
    """The transfer of the rows that all ranks send each other in a round."""

    def __init__(self, group: ProcessGroup, what: str, steps: Mapping[int, Step], work: Work) -> None:
        self._group, self._what = group, what
        xp, rank = group._lanes.namespace, group.rank
        sent, received = ([list[Array]() for _ in range(group.size)] for _ in range(2))
        for number, step in steps.items():
            if step.rank == step.source == rank:
                work.do(number, work)
                continue
            for move, target, source in work.routes(number) if rank in (step.rank, step.source) else ():
                if step.source == rank:
                    sent[step.rank] += move.read(source.of(work.arrays))
                else:
                    received[step.source] += move.written(target.of(work.arrays))
        of_sent, of_received = ([sum(map(_padded, each)) for each in arrays] for arrays in (sent, received))
        self._sent, self._received = xp.empty(sum(of_sent), np.uint8), xp.empty(sum(of_received), np.uint8)
        for part, array in _parts(self._sent, sent):
            part[...] = array
        self._arrays = received
        self._handle = group._exchange_bytes(self._received, self._sent, of_received, of_sent)

    def finish(self) -> None:
        """Wait for the rows of other ranks, and put them in place."""
        self._group._await(self._handle, self._what)
        for part, array in _parts(self._received, self._arrays):
            array[...] = part


def _padded(array: Array) -> int:
    """Return the bytes of an array in a message, including padding."""
    return -(-int(array.nbytes) // _ALIGNMENT) * _ALIGNMENT


def _parts(message: Array, arrays: list[list[Array]]) -> Iterator[tuple[Array, Array]]:
    """Yield the part of a message that holds an array, and the array."""
    first = 0
    for array in itertools.chain(*arrays):
        yield message[first : first + array.nbytes].view(array.dtype).reshape(array.shape), array
        first += _padded(array)


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
