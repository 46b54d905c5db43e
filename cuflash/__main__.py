"""Commands of cuflash; each has --help.

    python -m cuflash             what this machine can run, and how to fix the rest
    python -m cuflash doctor      the same
    python -m cuflash memory      bytes of a KV cache
    python -m cuflash roofline    the minimal time of a call on a GPU, and its bottleneck
    python -m cuflash study       the softmax mass of your q, k and v that block patterns keep
    python -m cuflash --version   the version of cuflash
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from .diagnosis import doctor
from .study.calculators import memory_report
from .study.command import study_report
from .study._roofline import roofline_report


def _refused(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _doctor_report(arguments: Sequence[str]) -> str:
    if arguments and arguments[0] not in _HELP:
        _refused(f"python -m cuflash doctor: error: the command takes no arguments; got {' '.join(arguments)}")
    return str(__doc__ if arguments else doctor()).rstrip("\n")


_HELP = ("-h", "--help")
_VERSION = ("-V", "--version")
_COMMANDS = {"doctor": _doctor_report, "memory": memory_report, "roofline": roofline_report, "study": study_report}


def _report(arguments: Sequence[str]) -> str:
    """Return the text that a command prints."""
    name, *rest = arguments or ["doctor"]
    if name in _HELP:
        return _doctor_report(arguments)
    if name in _VERSION and not rest:
        return f"cuflash {__version__}"
    if name in _VERSION:
        _refused(f"python -m cuflash: error: {name} takes no arguments; got {' '.join(rest)}")
    if name.startswith("-"):
        _refused(f"python -m cuflash: error: options are --help and --version; got {name}")
    if name not in _COMMANDS:
        _refused(f"python -m cuflash: error: the command must be {', '.join(_COMMANDS)} or none; got {name}")
    return _COMMANDS[name](rest)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may contain characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            print(_report(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has ended; Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
