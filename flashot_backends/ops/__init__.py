"""The operations: the mathematics, with no host and no device in it."""
