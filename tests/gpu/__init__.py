"""Numbers on a real card. `cases.py` holds them; pytest runs them, or `python -m tests.gpu`."""

import bench as bench  # a checkout that is not installed is found by torch
