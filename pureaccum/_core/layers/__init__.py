"""What may be asked for beside gradients, each a layer in a file of its own: see ``order``."""
