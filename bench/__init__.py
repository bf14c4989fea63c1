"""Side-by-side measurements: eager, the reference compiler and tilewright, in one run.

- `programs`: small memory-bound programs
- `models`:   the model zoo, plain torch.nn, sizes by name
- `measure`:  interleaved timing, value checks, geomeans, the machine header
- `suites`:   memory, models and compile, each giving a table of results
- `worker`:   one model, one backend, one fresh process: the first-call seconds
- `report`:   tables for the terminal and for docs/measurements
"""

from __future__ import annotations
