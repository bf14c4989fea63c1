"""Numbers on a real card. `cases.py` holds them; pytest runs them, or `python -m tests.gpu`."""
