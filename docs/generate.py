"""Writes the pages of this folder that are made from the code: `make docs`.

`tests/cpu/test_docs.py` fails when a page on disk differs from what this would write.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilewright import config

FOLDER = Path(__file__).parent

_CONFIG = """\
# Options

Made by `make docs` from `src/tilewright/config.py`: change that file, not this one.

Read an option as an attribute of `tilewright.config`, set it the same way, or for a while with
`config.patch(...)`, as a context manager or a decorator. `torch.compile(..., options={...})`
takes the same names. The environment variable is read when the process starts. An option marked
"in cache key" shapes generated code: changing it never reuses what was compiled without it.

"""


def config_page() -> str:
    """The reference of all options."""
    return _CONFIG + config.table()


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
}


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
