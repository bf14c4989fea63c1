"""Lowering: an FX graph of ATen operators becomes a `Program` of loop nests and opaque calls.

Layer map, in the order the files build on each other:

- `sizes.py`    the border with `ShapeEnv`: sympy in, index expressions out
- `tensor.py`   the lazy tensor: an expression over index placeholders
- `pitch.py`    rows with slack, where options ask for it
- `context.py`  `Lowering`: makes buffers, nests and opaque calls for one graph
- `table.py`    the op table: `@lowers(aten.op)` and what is looked up there
- `promote.py`  type promotion and rounding, shared by the op families
- one file per op family: `pointwise.py`, `views.py`, `join.py`, `indexing.py`, `reductions.py`, ...
- `graph.py`    `lower(gm)`: walks the graph, calls the table, falls back to ATen
"""
