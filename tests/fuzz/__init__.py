"""Random programs compared with eager.

- `generate.py` a seed becomes a program: input specifications and lines of torch
- `check.py`    runs a program eagerly and compiled, and says how they differ
- `shrink.py`   the smallest program that still differs
- `build.py`    hand-written programs of the IR, made callable
- `stages.py`   runs the IR of a graph stage by stage, to name the stage that is wrong

`python -m tests.fuzz --programs 5000` runs many; a failure prints its seed and a short program.
"""
