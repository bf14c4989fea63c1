"""Whole models as their users run them: `python -m bench.real --help`."""
