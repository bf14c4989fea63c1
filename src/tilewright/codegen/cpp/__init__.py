"""C++ kernels: plain loops the compiler vectorises, over the helpers of `runtime/include/tw.h`.

- `text.py`     C++ for each scalar operation, literal and type
- `structure.py` the loop structure of a kernel, and which loop is vectorised
- `emit.py`     expressions and folds as statements, each common subexpression once
- `kernel.py`   `generate(program, group)`: the whole kernel
"""
