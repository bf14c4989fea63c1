"""Triton kernels for everything that is not a matrix product.

A group is planned, then written. `generate.py` asks the strategies in their order; each gives a
frozen plan of the kernel or the reason why it does not suit; the first plan is written.

- `analysis/`   what is known of a group: `facts.py` is what strategies ask, `work.py` what its
  operations cost, `precision.py`, `rounding.py`, `quantise.py` and `shared_functions.py` how
  exactly they have to be computed
- `rewrite/`    changes of loops and expressions before a group is planned
- `plan/`       `tiling.py` the axes of a tile and its modes, `configs.py` (with those of rows and
  of columns) the sizes of its blocks, `grid_order.py` the order of programs, `plan.py` all of it
- `strategies/` ways to write a kernel, or to refine the general one
- `tile/`       its text: `kernel.py` the whole, `lower.py` expressions, `ops.py` Triton for each
  operation, `reduce.py` reductions and scans, the others ways to move what is in memory
- `combo.py` several kernels that share a launch, `dedup.py` kernels of groups that are alike,
  `user_epilogue.py` what comes after a user's own kernel, `launch.py` what a launcher has to know
"""
