"""The gradients of single samples, reduced while they stream."""
