"""Arrays of a library that NumPy and CuPy do not know."""

from __future__ import annotations

from typing import Any


class Foreign:
    """An array that supports only DLPack; its export raises `fault`, if there is one."""

    def __init__(self, host: Any, device: tuple[int, int] = (1, 0), fault: Exception | None = None) -> None:
        self.host, self.device, self.fault = host, device, fault

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        return self.host.__dlpack__(**options)
