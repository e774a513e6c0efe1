"""Generates the list of vLLM's arguments that the settings are checked against.

Importing vLLM's parser takes seconds and loads torch; a mistyped argument should be answered sooner. So
the list is generated here, committed as ``app/settings/engine_arguments.json``, and proved fresh against
the installed vLLM by ``tests/real/test_arguments_fresh.py``. After an upgrade of vLLM::

    python -m app.engine.arguments
"""

from __future__ import annotations

import json
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Any

LIST = Path(str(resources.files("app.settings") / "engine_arguments.json"))


def generate() -> str:
    """The text of the list, one argument a line, so that an upgrade reads well as a diff."""
    import vllm
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: Any = make_arg_parser(FlexibleArgumentParser())
    entries = [
        _entry(group.title, action)
        for group in parser._action_groups
        for action in group._group_actions
        if action.option_strings and action.dest != "help"
    ]
    lines = ",\n".join("  " + json.dumps(entry) for entry in sorted(entries, key=lambda one: one["name"]))
    version = vllm.__version__.partition("+")[0]
    return f'{{"vllm": {json.dumps(version)}, "arguments": [\n{lines}\n]}}\n'


def _entry(group: str, action: Any) -> dict[str, Any]:
    return {
        "name": action.dest,
        "flags": list(action.option_strings),
        "kind": _kind(action),
        "type": {int: "int", float: "float"}.get(action.type, "text"),
        "group": group,
        "default": _default(action.default),
        "choices": [str(choice) for choice in action.choices or () if choice is not None],
    }


def _kind(action: Any) -> str:
    if action.nargs == 0:
        negated = any(flag.startswith("--no-") for flag in action.option_strings)
        return "switch" if negated else "flag"
    return {"+": "list", "*": "list", "?": "optional"}.get(action.nargs, "value")


def _default(value: Any) -> str:
    """A default as text. Whole configuration objects are vLLM's own matter, and differ by machine."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return "unset" if value == "==SUPPRESS==" else str(value)
    return "" if hasattr(value, "__dict__") or (isinstance(value, dict) and value) else str(value)


if __name__ == "__main__":
    LIST.write_text(generate(), encoding="utf-8")
    print(f"wrote {LIST}")
