"""The text of a kernel's tile: loads, operations, reductions, stores."""
