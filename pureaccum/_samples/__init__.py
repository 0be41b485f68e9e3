"""The gradients of single samples, reduced while they stream.

``chunks`` computes the gradients of a few samples at a time, ``reducers`` define how they are
reduced, and ``per_sample`` makes a function and an accumulator of the two. Gradients that are only
scaled (``scaling``), summed or multiplied need not be materialised (``by_layers``): ``layers``
record what each layer sees, by its ``layer_rules``, and gradients are sums of ``outer_products``.
``clipping``, ``noise_scale`` and ``gramian`` are the applications: the noisy sum of DP-SGD, the
spread of the gradients, and their inner products.
"""
