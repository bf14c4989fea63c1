"""Scheduling: a `Program` becomes ordered fusion groups and a memory plan.

- `loops.py`    transformations of one nest: rename, split and merge loops, drop dead nests
- `legality.py` pure: may this nest join that group? yes with the aligned nest, or a reason
- `group.py`    the fusion group, and grouping by shared traffic
- `segments.py` inside a group: which members share a loop
- `memory.py`   lifetimes: what is allocated, reused, written in place, freed
- `traffic.py`  bytes moved, under the compatible counting contract and honestly
- `plan.py`     `schedule(program)`: all of it in order
"""
