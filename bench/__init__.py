"""Side-by-side measurements: eager, the reference compiler and tilewright, in one run.

- `programs`: small memory-bound programs
- `models`:   the model zoo, plain torch.nn, sizes by name
- `measure`:  interleaved timing, value checks, geomeans, the machine header
- `suites`:   memory, models and compile, each giving a table of results
- `worker`:   one model, one backend, one fresh process: the first-call seconds
- `report`:   tables for the terminal and for docs/measurements
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

_NAME = "tilewright"
_METADATA = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n"
_POINTS = f"[torch_dynamo_backends]\n{_NAME} = {_NAME}.backend:compile_fx\n"


def be_found() -> None:
    """`backend="tilewright"` of a checkout that is not installed: what an installation in place
    would leave beside the package, for this process and those it starts."""
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name=_NAME):
        return
    folder = Path(__file__).parents[1] / "src" / f"{_NAME}.egg-info"
    folder.mkdir(exist_ok=True)
    (folder / "PKG-INFO").write_text(_METADATA)
    (folder / "entry_points.txt").write_text(_POINTS)


be_found()
