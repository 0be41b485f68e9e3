"""What was accumulated on several ranks, merged: the sums of all, once a window."""

from .._base import make_public as _make_public
from .collectives import Pending as Pending
from .collectives import all_reduce as all_reduce
from .collectives import shard_batch as shard_batch


_make_public(globals(), __name__)
