"""Single loop nests: what they touch, what waits for what, transformations."""
