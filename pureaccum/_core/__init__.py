"""The primitive, ``microbatch``, and the monoid: sums of gradients and of weights."""
