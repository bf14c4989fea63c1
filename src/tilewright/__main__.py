from tilewright.cli import run

run()
