"""Peak rates of GPUs, from NVIDIA's numbers of units per multiprocessor and the highest clock."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..arrays import describe, is_finite
from ..errors import UnsupportedProblem, refuse
from ..keywords import explains_keywords
from .device import DeviceSpec


@explains_keywords
@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Rates that no kernel can exceed; per multiprocessor and cycle, except for `clock` and `hbm_bytes`.

    Parameters
    ----------
    clock : float
        Cycles per second at the highest clock; data sheets quote rates at a lower clock.
    hbm_bytes : float
        Bytes per second between the chip and its memory.
    tensor_16, tensor_tf32, tensor_64 : float
        Multiplications and additions of dense tensor core products, of 16-bit elements accumulated in float32, of tf32
        and of float64; 0 if the chip has no such instruction.
    flops_32, flops_64 : float
        Multiplications and additions of fused multiply-add units.
    exponentials : float
        Results of exp2, or of other special functions, in float32.
    l2_bytes : float
        Bytes between a multiprocessor and the level-2 cache.

    Raises
    ------
    UnsupportedProblem
        A rate is not a finite number of at least 0, or `clock` or `hbm_bytes` is 0.

    Examples
    --------
    >>> h100 = Peaks.of(DeviceSpec.gpu("H100"))
    >>> h100.tensor_16, h100.exponentials, h100.hbm_bytes / 1e12
    (4096, 16, 3.35)
    """

    clock: float
    hbm_bytes: float
    tensor_16: float = 0
    tensor_tf32: float = 0
    tensor_64: float = 0
    flops_32: float = 256
    flops_64: float = 4
    exponentials: float = 16
    l2_bytes: float = 64

    def __post_init__(self) -> None:
        reasons = []
        for field in fields(self):
            value, least = getattr(self, field.name), 0
            is_rate = is_finite(value) and value >= least
            if not is_rate or (value == 0 and field.name in ("clock", "hbm_bytes")):
                reasons.append(f"{field.name} must be a finite rate that is not negative; got {describe(value)}")
        refuse(reasons)

    @staticmethod
    def of(device: DeviceSpec) -> Peaks:
        """Look up the rates of a GPU by its name, which must contain the name of a known GPU such as "H100".

        Parameters
        ----------
        device : DeviceSpec
            The GPU.

        Returns
        -------
        Peaks
            Its rates.

        Raises
        ------
        UnsupportedProblem
            The rates of the device are unknown.

        Examples
        --------
        >>> Peaks.of(DeviceSpec.gpu("T4")).tensor_tf32
        0
        """
        named = [name for name in _PEAKS if name in device.name]
        if named:
            return _PEAKS[max(named, key=len)]
        raise UnsupportedProblem(
            [f"device must be one of {', '.join(_PEAKS)}; got {device.name}: pass peaks=cuflash.study.Peaks(...)"]
        )


# Rates per multiprocessor: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", and architecture
# whitepapers. Memory bandwidth: data sheets. Clocks: the highest that nvidia-smi lists.
_PEAKS = {
    "T4": Peaks(clock=1.59e9, hbm_bytes=320e9, tensor_16=1024, flops_32=128, flops_64=4),
    "A100": Peaks(
        clock=1.41e9, hbm_bytes=2.039e12, tensor_16=2048, tensor_tf32=1024, tensor_64=128, flops_32=128, flops_64=64
    ),
    "RTX 3090": Peaks(clock=2.1e9, hbm_bytes=936e9, tensor_16=512, tensor_tf32=256),
    "RTX 4090": Peaks(clock=3.105e9, hbm_bytes=1.008e12, tensor_16=512, tensor_tf32=256),
    "L4": Peaks(clock=2.04e9, hbm_bytes=300e9, tensor_16=1024, tensor_tf32=512),
    "H100": Peaks(
        clock=1.98e9, hbm_bytes=3.35e12, tensor_16=4096, tensor_tf32=2048, tensor_64=256, flops_64=128
    ),
    "H200": Peaks(
        clock=1.98e9, hbm_bytes=4.8e12, tensor_16=4096, tensor_tf32=2048, tensor_64=256, flops_64=128
    ),
    "B200": Peaks(
        clock=1.965e9, hbm_bytes=8e12, tensor_16=8192, tensor_tf32=4096, tensor_64=256, flops_64=128
    ),
    "RTX 5090": Peaks(clock=3.09e9, hbm_bytes=1.792e12, tensor_16=512, tensor_tf32=256),
}  # fmt: skip
