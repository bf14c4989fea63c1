"""The command line: `python -m tilewright`, or `tilewright`.

tilewright show                       what the cache folder holds
tilewright export                     the records of tuning, as JSON
tilewright pack FILE                  write the cache folder to a file
tilewright unpack FILE                add a file's contents to the cache folder
tilewright merge INTO FILE FILE...    make one pack of several
tilewright diff FILE FILE             what two packs differ in
tilewright validate FILE              whether a pack is for this machine
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from tilewright import sharing
from tilewright.errors import TilewrightError
from tilewright.runtime import store
from tilewright.tune import records


@click.group(help=__doc__ and __doc__.splitlines()[0])
def main() -> None: ...


_FILE = click.Path(path_type=Path)


def _need_folder() -> None:
    """A folder for this process alone is of no use to a command, which then ends."""
    if not store.is_lasting():
        raise TilewrightError("there is no cache folder that can be written to",
                              hint="set TILEWRIGHT_CACHE_DIR to one")  # fmt: skip


@main.command(help="What the cache folder holds.")
def show() -> None:
    files = list(store.files(store.root()))
    tables = records.exported()
    size = sum(f.st_size for _, f in files) / 1e6
    measured, chosen = len(tables["trials"]), len(tables["choices"])
    click.echo(f"{store.root()}: {len(files)} files, {size:.1f} MB, {measured} measurements, "
               f"{chosen} choices")  # fmt: skip
    for folder in store.layers():
        click.echo(f"{folder}: read only")


@main.command(help="The records of tuning, as JSON.")
def export() -> None:
    click.echo(json.dumps(records.exported(), indent=1))


@main.command(help="Write the cache folder to a file.")
@click.argument("file", type=_FILE)
def pack(file: Path) -> None:
    _need_folder()
    made = sharing.pack(file)
    click.echo(f"{file}: {len(made.files)} files, {len(made.records['choices'])} choices")


@main.command(help="Add a file's contents to the cache folder.")
@click.argument("file", type=_FILE)
@click.option("--force", is_flag=True, help="Take the records of another kind of machine.")
def unpack(file: Path, force: bool) -> None:
    _need_folder()
    click.echo(f"{sharing.unpack(file, force=force)} files and records are new")


@main.command(help="Make one pack of several.")
@click.argument("into", type=_FILE)
@click.argument("files", type=_FILE, nargs=-1, required=True)
def merge(into: Path, files: tuple[Path, ...]) -> None:
    made = sharing.merge(into, *files)
    click.echo(f"{into}: {len(made.files)} files, {len(made.records['choices'])} choices")


@main.command(help="What two packs differ in.")
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
def diff(first: Path, second: Path) -> None:
    found = sharing.diff(first, second)
    click.echo(str(found))
    sys.exit(1 if found else 0)


@main.command(help="Whether a pack is for this machine.")
@click.argument("file", type=_FILE)
def validate(file: Path) -> None:
    wrong = sharing.validate(file)
    click.echo("\n".join(wrong) or "it is for this machine")
    sys.exit(1 if wrong else 0)


def run() -> None:
    """The command, with errors for people."""
    try:
        main()
    except TilewrightError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    run()
