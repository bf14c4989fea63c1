"""Scheduling: a `Program` becomes ordered fusion groups and a memory plan.

- `loops.py`    transformations of one nest: rename, split and merge loops, drop dead nests
- `access.py`   how nodes touch buffers: strides, what is touched, what can never meet
- `depend.py`   which nodes wait for which
- `order.py`    an order of groups that stays right while groups are joined
- `cost.py`     the bytes a group moves, and what joining two saves
- `legality.py` pure: may these two groups be one kernel? yes with the joint group, or a reason
- `limits.py`   what a processor asks of a group beyond being right
- `improve.py`  changes of the program that save bytes: cuts, accumulating products, placed results
- `group.py`    the fusion group, and the search for the grouping that moves the fewest bytes
- `recompute.py` values computed again where they are used, in place of being stored
- `segments.py` inside a group: which members share a loop
- `pairs.py`    softmax of rows in parts: a largest value and a sum relative to it in one pass
- `launches.py` kernels that fold and share launches, once what is to be cut is cut
- `carve.py`    groups that one kernel cannot express, in pieces
- `delay.py`    parts of a buffer written when the rest is
- `memory.py`   lifetimes: what is allocated, reused, written in place, freed
- `traffic.py`  bytes moved, under the compatible counting contract and honestly
- `plan.py`     `schedule(program)`: all of it in order
"""
