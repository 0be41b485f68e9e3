"""Trees, DTensors, donation, the private names of torch, and the checks of what callers hand in."""
