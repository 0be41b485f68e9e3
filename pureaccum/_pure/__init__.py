"""Modules and random numbers made pure."""
