"""Trees on disk, bit for bit: ``save(path, tree)`` and ``load(path, like=tree)``.

``save_load`` has these two, and says of each leaf what a file has to hold. ``file_format`` is the
header of a file, as bytes and as what it says; ``files`` writes and reads the tensors after it, and
sees to it that a file is there whole or not at all. ``shards`` is a folder of such files, of which
each of several ranks writes one.
"""

from .save_load import load as load
from .save_load import save as save
