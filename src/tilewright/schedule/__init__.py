"""Scheduling: a `Program` becomes ordered fusion groups and a memory plan.

- `nests/`   single loop nests: `transform.py` renames, splits and merges loops, `access.py` how
  nodes touch buffers, `dependences.py` which wait for which, `segments.py` which share a loop
- `fusion/`  `legality.py` may two groups be one kernel? yes with the joint group, or a reason;
  `cost.py` the bytes that saves; `suitability.py` what a card asks beyond that; `group.py` the
  fusion group and the search for the grouping that moves the fewest bytes; `row_column.py` rows and
  columns in one kernel; `take_apart.py` groups that one kernel cannot express, in pieces
- `split/`   long reductions in parts: `policy.py` whether, and into how many, `cyclic.py` how rows
  are dealt out to them, `apply.py` the nests that come of it, `online_softmax.py` a largest value
  and a sum relative to it in one pass
- `rewrite/` changes of the program that save bytes: `improve.py` cuts, accumulating products,
  placed results; `rematerialise.py` values computed again; sums, scans and scatters
- `launch/`  groups that share a launch, and the direction a kernel runs in
- `order/`   `topological.py` an order that stays right while groups are joined, `peak_memory.py`
  the one that keeps least alive, `defer.py` parts of a buffer written when the rest is
- `memory.py`   lifetimes: what is allocated, reused, written in place, freed; `pool.py` pools
- `traffic.py`  bytes moved, under the compatible counting contract and honestly
- `plan.py`     `schedule(program)`: all of it in order
"""
