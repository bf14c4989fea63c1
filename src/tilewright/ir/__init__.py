"""The loop IR: what the compiler thinks in between the FX graph and generated code.

Layer map, in the order the files build on each other:

- `expr.py`    the one immutable, hash-consed node for values and for indices
- `index.py`   integer algebra over index expressions: canonical polynomials, bounds, div and mod
- `ops.py`     the table of scalar operations, each with its result type, cost and torch reference
- `build.py`   constructors of value expressions, with the few exact simplifications
- `program.py` buffers, loop nests, opaque calls, and the `Program` made of them
- `verify.py`  the executable specification of a `Program`
- `interp.py`  a torch interpreter of a `Program`, to bisect a wrong result
- `show.py`    text that evaluates back to the same objects
"""
