"""What was accumulated on several ranks, merged: the sums of all ranks, once a window.

``collectives`` merges states, for users and for a step with ``group``. It stands on ``buckets``,
which sends many tensors in few collectives, and the numbers of each rank with them. Whether ranks
hold the same is compared on the way (see ``_base/agreement.py``).
"""

from .._base import make_public as _make_public
from .collectives import Pending as Pending
from .collectives import all_reduce as all_reduce
from .collectives import shard_batch as shard_batch


_make_public(globals(), __name__)
