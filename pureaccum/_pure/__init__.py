"""Modules and random numbers made pure."""

from .functional import functional as functional
from .keys import dropout as dropout
from .keys import fold_in as fold_in
from .keys import key as key
from .keys import normal as normal
from .keys import split_key as split_key
from .keys import uniform as uniform
