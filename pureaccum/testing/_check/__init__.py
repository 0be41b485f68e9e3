"""The checker: may a loss, or a loop, be cut into microbatches, and why not?"""
