"""``python -m cuflash`` prints what this machine can run; ``memory`` and ``roofline`` after it what calls take."""

import io
import sys

from .calculators import memory_report
from .doctor import doctor
from .study.roofline import roofline_report

_REPORTS = {"memory": memory_report, "roofline": roofline_report}

if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what the terminal's encoding has no letter for
    sys.stdout.reconfigure(errors="backslashreplace")
print(_REPORTS[sys.argv[1]](sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in _REPORTS else doctor())
