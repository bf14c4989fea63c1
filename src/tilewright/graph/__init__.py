"""From the graph AOTAutograd hands over to the graph that is lowered.

- `decompositions.py` which ATen ops are rewritten into simpler ones while the graph is traced
- `simplify.py`       rule lists on the traced graph: no-ops, dead code, common subexpressions
- `complex.py`        complex arithmetic between pairs of floats, done with these
- `batch.py`          ops that are alike as one, where options ask for it
"""
