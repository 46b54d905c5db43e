"""The cost model of calls on several devices: bytes that each method moves, and the time of both passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from ..arrays import describe, int_reasons, is_finite
from ..errors import refuse
from ..keywords import explains_keywords

METHODS = ("gather", "heads")
TILE = 128  # number of queries that a multiprocessor computes at a time


@explains_keywords
@dataclass(frozen=True)
class Machine:
    """Rates of a device and its links, which `ContextParallel.explain` reads; the defaults are assumptions for an H200.

    Parameters
    ----------
    forward_rate, backward_rate : float
        FLOP/s of the passes.
    link : float
        Bytes per second that a device receives.
    launch : float
        Seconds in which the host queues a copy. One thread queues the steps of all ranks.
    processors : int
        Number of multiprocessors. At the end of each group of heads, they are idle for a quarter of a tile's time.

    Raises
    ------
    UnsupportedProblem
        A rate is not positive and finite, or `launch` or `processors` is negative.

    Examples
    --------
    >>> Machine(link=50e9).link
    50000000000.0
    """

    forward_rate: float = 720e12
    backward_rate: float = 560e12
    link: float = 280e9
    launch: float = 15e-6
    processors: int = 132

    def __post_init__(self) -> None:
        reasons = int_reasons(0, processors=self.processors)
        for name, value in asdict(self).items():
            is_valid = is_finite(value) and (value > 0 or value == 0 and name == "launch")
            if name != "processors" and not is_valid:
                rule = "a finite number of at least 0" if name == "launch" else "positive and finite"
                reasons.append(f"{name} must be {rule}; got {describe(value)}")
        refuse(reasons)


TYPICAL = Machine()  # its rates decide on the method and the groups of heads


class CallSize(NamedTuple):
    """The numbers of a call that the model reads.

    Attributes
    ----------
    size : int
        Number of devices.
    rows : int
        Number of rows over all batch entries, of queries as well as of keys.
    num_heads, num_kv_heads, head_dim, itemsize : int
    scores : float
        Number of scores that the mask keeps, over all batch entries and query heads.
    imbalance : float
        The largest work of a device, divided by the mean.
    """

    size: int
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    scores: float
    imbalance: float = 1.0


def idle_share(machine: Machine, tiles: float) -> float:
    """Return the time that a device is idle at the end of a group, as a share of the time of a number of tiles."""
    return machine.processors / max(4 * tiles, 4.0)


class Estimate(NamedTuple):
    """The modeled cost of a pass: seconds of products, bytes that a device receives, and the seconds for these."""

    compute: float
    nbytes: float
    exchange: float

    @property
    def efficiency(self) -> float:
        """The share of linear speed if no exchange is hidden behind products."""
        return self.compute / (self.compute + self.exchange) if self.compute else 1.0


def received(shape: CallSize, method: str, *, backward: bool) -> float:
    """Return the bytes that a device receives in a pass if it needs all keys.

    With "gather", each of P devices receives (P - 1) / P of K and V, and in the backward pass also float32 gradients of
    its rows from the others. With "heads", it receives Q, K and V of its heads and returns O; in the backward pass, it
    receives dO and returns dQ, dK and dV.
    """
    size, group = shape.size, shape.num_heads / max(1, shape.num_kv_heads)
    kv = 2.0 * shape.rows * shape.num_kv_heads * shape.head_dim * shape.itemsize
    others = (size - 1) / size
    if method == "gather":
        return others * kv * (1 + 4 / shape.itemsize * backward)
    return others / size * kv * (1 + group)


def estimate(shape: CallSize, method: str, machine: Machine, *, backward: bool) -> Estimate:
    """Return the modeled cost of a pass."""
    flops = (10.0 if backward else 4.0) * shape.scores * shape.head_dim
    compute = flops / shape.size / (machine.backward_rate if backward else machine.forward_rate)
    if method == "gather":
        compute *= shape.imbalance
    nbytes = received(shape, method, backward=backward)
    return Estimate(compute, nbytes, nbytes / machine.link)
