"""The gradients of single samples, reduced while they stream.

``chunks`` takes the gradients of a few samples at a time, ``reducers`` say what becomes of them,
and ``per_sample`` makes a function and an accumulator of the two. What is only scaled
(``scaling``), summed or multiplied goes ``by_layers``: ``layers`` tell what they see, by their
``layer_rules``, and gradients come as ``outer_products``. ``clipping``, ``noise_scale`` and
``gramian`` are what that is used for: DP-SGD's noisy sum, how much gradients scatter, and their
products with one another.
"""
