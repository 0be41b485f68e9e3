"""The layers that a rule asks for, and the order in which they are put on: the innermost first.

A gradient goes through them from the last one to the first: ``skip`` lets it pass, or keeps it,
before ``squares`` sees its norm. A new statistic is a file beside this one, and a line here.
"""

from collections.abc import Callable
from typing import get_args

from ..._base import checks
from .. import losses
from ..seams import Engine, Layer, Nonfinite, Rule, Seams, Window
from . import ranks
from .aux import aux
from .raising import raising
from .scale import scale
from .skip import skip
from .squares import squares


LAYERS: list[tuple[Callable[[Rule], bool], Layer]] = [
    (lambda rule: rule.has_aux, aux),
    (lambda rule: rule.scaled, scale),
    (lambda rule: rule.squares, squares),
    (lambda rule: rule.nonfinite == "raise", raising),
    (lambda rule: rule.nonfinite == "skip", skip),
]


def check_rule(rule: Rule) -> Rule:
    """The rule with its layers, or an error that says which reductions it may hold."""
    checks.check_choice(rule.reduction, get_args(losses.Reduction), "reduction")
    checks.check_choice(rule.nonfinite, get_args(Nonfinite), "nonfinite")
    checks.check_choice(rule.engine, get_args(Engine), "engine")
    return rule._replace(layers=tuple(layer for asked, layer in LAYERS if asked(rule)))


def layered(seams: Seams, window: Window) -> Seams:
    """Seams with all layers around them."""
    for layer in window.rule.layers:
        seams = layer(seams, window)
    return ranks.reaching_ranks(seams, window) if ranks.ranks_exist() else seams
