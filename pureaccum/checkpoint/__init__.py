"""Trees on disk, bit for bit: ``save(path, tree)`` and ``load(path, like=tree)``.

``save_load`` has these two functions, and lists what a file must hold for each leaf.
``file_format`` writes and parses the header of a file. ``files`` writes and reads the tensors after
it, and makes sure that a file appears whole or not at all. ``shards`` is a folder of such files,
one per rank.
"""

from .save_load import load as load
from .save_load import save as save
