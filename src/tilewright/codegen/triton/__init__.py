"""Triton kernels for everything that is not a matrix product.

- `text.py`    Triton for each operation, literal, cast and fold
- `shape.py`   the axes of a kernel's tile, or why a group cannot be one kernel; `loop_order.py` the
  order its loops are walked in
- `configs.py` block sizes, warps and stages: the model's choice, and a few to measure; those of
  folds in `row_configs.py` and `column_configs.py`, what they share in `blocks.py`
- `emit.py`    expressions as statements, each common subexpression once
- `folds.py`   reductions and scans; `online.py` softmax in one pass
- `leaning.py` which rows are moved sixteen bytes at once though they begin anywhere; `lean.py` how
- `parts.py`   rows that several programs have parts of
- `scatter.py` stores that combine with what is there
- `kernel.py`  the whole kernel; `made.py` what is handed on of it; `combo.py` several kernels that
  share a launch; `docs/architecture.md` lists the forms that have files of their own
- `generate.py` `generate(program, group, target)`; `limits`: why there is no kernel
"""
