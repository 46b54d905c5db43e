"""Attention on several ranks that share the rows of a sequence: context parallelism."""

from ._group import Group, PeerLost
from ._model import Machine
from ._parallel import ContextParallel
from ._processes import group_of
from ._threads import run

__all__ = ["ContextParallel", "Group", "Machine", "PeerLost", "group_of", "run"]
