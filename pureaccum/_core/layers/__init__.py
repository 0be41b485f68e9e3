"""What may be asked for beside gradients, each a layer in a file of its own: see ``order``.

``aux`` is what a loss returns beside its value, ``scale`` a loss scale, ``squares`` are squared
norms; ``raising`` and ``skip`` say what becomes of inf and NaN, and ``ranks`` of a loss that
reached other ranks.
"""
