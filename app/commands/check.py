"""``fairgate check``: prints the effective configuration, where each value was given, and what was ignored.

Called by ``app/__main__.py`` once the settings have been loaded and found right. Secrets are masked.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..settings import Loaded

_PIPED_WIDTH = 160
"""Columns where standard output is no terminal: a log should not be wrapped at 80."""


def check(loaded: Loaded, *, as_json: bool) -> None:
    """Print the settings as a table, or as one JSON object for a script."""
    if as_json:
        print(json.dumps(_as_object(loaded), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    console.print(_table(loaded))
    for notice in loaded.notices:
        console.print(Text(f"Notice: {notice}"))
    console.print("OK")


def _as_object(loaded: Loaded) -> dict[str, object]:
    return {
        "settings": {name: {"value": value, "origin": origin} for name, value, origin in loaded.effective()},
        "engine_flags": loaded.settings.engine.to_flags(),
        "notices": list(loaded.notices),
    }


def _table(loaded: Loaded) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("Variable", no_wrap=True)
    table.add_column("Value", overflow="fold")
    table.add_column("From", overflow="fold")
    for name, value, origin in loaded.effective():
        # As Text: a value may hold brackets, which rich would read as markup.
        table.add_row(Text(name), Text(value), Text(origin), style="dim" if origin == "default" else None)
    return table
