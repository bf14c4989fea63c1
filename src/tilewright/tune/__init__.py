"""Choosing by measuring: anything with candidates, a choice, and its record.

- `clock.py`   how long a kernel takes on the card
- `kernels.py` the configuration of a loop kernel: the model's, or the fastest measured
"""
