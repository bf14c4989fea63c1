"""Ways to write a kernel, each with the reasons why it does not suit a group; `generate.py` has
their order."""
