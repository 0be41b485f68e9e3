"""What all wings stand on: trees and DTensors, states, checks, and the private names of torch.

``torch_internals`` has every private name of torch, and ``dtensors`` all that is known of DTensors
(``sharded_rows``: of batches of them); on these stands the arithmetic of ``trees``. ``containers``
are classes of a user's own that are trees too, and ``named_leaves`` finds and sets a leaf by name.
``states`` are tuples of tensors that may be given up, and stacked; ``reprs`` print them. ``checks``
say what is wrong with what callers hand in, and ``refusals`` what torch's compiler, vmap and vjp
refuse. ``asking`` decides at which calls a loss is checked. ``claims`` compare what ranks hold, by
checksums of their bytes, and by the ``settings`` that makers were given. ``random_state`` lets the
same random numbers be drawn again, ``observation`` leaves nothing behind, and a ``deterministic``
run knows neither chance nor narrow dtypes.
"""
