"""Command lines of the experiments: an invalid flag or an unusable folder gives one line on standard error."""

import argparse
import dataclasses
import math
import sys
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, and uses a module's docstring as its help."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            prog=Path(sys.argv[0]).stem, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """End the program with status 2 and the message."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help lists the flags)\n")


def check_values(config_type: Any, values: Mapping[str, Any]) -> None:
    """Refuse values of a dataclass's fields that no experiment accepts.

    Numbers must be finite and positive, or at least 0 if the field's default contains a 0; lists must not be empty.

    Raises
    ------
    ValueError
        A value is not acceptable.
    """
    types = typing.get_type_hints(config_type)
    defaults = {field.name: field.default for field in dataclasses.fields(config_type)}
    for name, value in values.items():
        several = typing.get_origin(types[name]) is tuple
        kind = typing.get_args(types[name])[0] if several else types[name]
        if several and not value:
            raise ValueError(f"{name} must not be empty")
        if kind in (int, float):
            takes_zero = 0 in (defaults[name] if several else (defaults[name],))
            for number in value if several else (value,):
                if not math.isfinite(number) or number < 0 or (number == 0 and not takes_zero):
                    wanted = "must not be negative" if takes_zero else "must be positive"
                    raise ValueError(f"{name} {wanted} and finite; got {number}")


def check_writable(folder: Path) -> None:
    """End the program with one line if files cannot be written to a folder, which is not created."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        sys.exit(f"cannot write results to {folder} ({error.strerror}): name another folder by --results")
