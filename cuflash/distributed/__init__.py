"""Attention on several ranks that share the rows of a sequence: context parallelism."""

from ._group import Group, PeerLost, run
from ._model import Machine
from ._parallel import ContextParallel

__all__ = ["ContextParallel", "Group", "Machine", "PeerLost", "run"]
