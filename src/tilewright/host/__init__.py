"""The host program: Python text that allocates, calls kernels and libraries, and returns.

- `text.py`    sizes, views and arguments as Python text
- `program.py` `assemble(schedule, kernels)`: the text of the whole program, and its loading
- `verify.py`  what is wrong with a program, before it is kept
- `support.py` what the generated text imports
"""
