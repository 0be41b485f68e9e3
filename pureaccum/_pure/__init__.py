"""Modules and random numbers made pure: functions of what they are given, and of nothing else.

``functional`` calls a module by ``shell``, a copy of it that has slots for other tensors. With a
microbatch size it goes on to ``microbatched_module``: at each call ``recorded_module`` runs it for
one microbatch, ``trace`` writes its operations down, with ``symbols`` for values, and ``levels``
cuts them where ``batch_norm`` merges moments. ``loading`` copies
a trained state into the module. ``keys`` stands alone, and makes random numbers of a key and a
position.
"""
