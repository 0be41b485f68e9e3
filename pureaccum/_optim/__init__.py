"""Optimizers as pairs of pure functions, schedules, and what is made of several optimizers."""
