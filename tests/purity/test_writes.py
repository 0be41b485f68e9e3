"""A loss that writes to what it is given or captures is refused, before it happens where it can be."""
