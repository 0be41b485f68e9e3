"""What all wings stand on: trees and DTensors, states, checks, and the private names of torch.

``torch_internals`` has every private name of torch, and ``dtensors`` all that is known of DTensors;
on these two stands the arithmetic of ``trees``. ``containers`` are classes of a user's own that are
trees too. ``states`` are tuples of tensors that may be given
up, and stacked; ``checks`` say what is wrong with what callers hand in, and ``refusals`` what
torch's compiler, vmap and vjp refuse. ``agreement`` compares what ranks hold, by checksums of
their bytes; ``generators`` draw the same random numbers again, ``observation`` leaves nothing
behind, and a ``deterministic`` run knows neither chance nor narrow dtypes.
"""
