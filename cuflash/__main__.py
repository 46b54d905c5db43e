"""``python -m cuflash`` prints what this machine can run; commands of their own behind it do more.

``python -m cuflash memory`` prints what a KV cache takes, ``python -m cuflash roofline`` what a call takes, and
``python -m cuflash study`` what block patterns keep.
"""

import io
import sys

from .diagnosis import doctor
from .study.calculators import memory_report
from .study.command import study_report
from .study.roofline import roofline_report

_COMMANDS = {"memory": memory_report, "roofline": roofline_report, "study": study_report}

if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what the terminal's encoding has no letter for
    sys.stdout.reconfigure(errors="backslashreplace")
if sys.argv[1:] and sys.argv[1] not in _COMMANDS:
    sys.exit(f"python -m cuflash: error: the command must be {', '.join(_COMMANDS)} or none; got {sys.argv[1]}")
print(_COMMANDS[sys.argv[1]](sys.argv[2:]) if sys.argv[1:] else doctor())
