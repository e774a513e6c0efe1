"""The command ``python -m loadtests``: one subcommand a scenario. A new scenario is one line here."""

from __future__ import annotations

import signal
import sys

import typer

from . import decide, overhead
from .client import LoadFailed
from .servers import ServerFailed

main = typer.Typer(
    help="Load tests against real servers. Each starts and ends its servers itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
main.command("overhead")(overhead.command)
main.command("decide")(decide.command)


@main.callback()
def _scenarios() -> None:
    """Keeps the scenario's name on the command line while there is only one."""


if __name__ == "__main__":
    # A SIGTERM must stop the servers too: as an exception it passes all their context managers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (LoadFailed, ServerFailed) as failure:
        sys.exit(f"loadtests: {failure}")
