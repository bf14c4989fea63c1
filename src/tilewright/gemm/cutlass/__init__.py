"""Products by CUTLASS, compiled by nvcc, with what follows them fused as an epilogue visitor.

In the order of the work:

- `install.py`        where CUTLASS is, which one, for which architecture and toolkit
- `operations.py`     the operations it lists, as frozen rows, kept; `serialization.py` its objects
- `matrices.py`       matrices in its terms; `arrange.py` whole problems
- `evt.py`            what follows a product: memory, arithmetic, or why not
- `filter.py`         the operations that fit a problem, and the model that orders them
- `render.py`         the C++ of a kernel and of the function that calls it
- `bind.py`           the kernel as the host program calls it
- `runner.py`         a program around one kernel
- `provider.py`       the provider: candidates of all this
- `words.py`          the names other programs know these by
"""
