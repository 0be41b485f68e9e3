"""Trees on disk, bit for bit: ``save(path, tree)`` and ``load(path, like=tree)``."""

from .save_load import load as load
from .save_load import save as save
