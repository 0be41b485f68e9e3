"""A whole optimizer step as one pure function, eager and compiled."""
