"""``python -m mjolnir``: the command line, from a checkout that is not installed."""

from mjolnir.cli import app

app(prog_name="mjolnir")
