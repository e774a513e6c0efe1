"""Reads the flags of ``vllm serve``, so that a present deployment moves over as it is.

Called by ``load.py`` with what follows ``fairgate serve --``. The spellings are those of vLLM's own parser:
``--a-b``, ``--a_b``, ``--a=1``, ``--no-a``, ``-tp 2``, ``-O3``, ``--a.b.c 1``, ``--config FILE``. A flag that
is a setting of ours becomes that variable; the rest goes to the engine's ``extra``.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .arguments import IDLE, REFUSED, RENAMED, Argument, arguments_by_flag
from .engine import EngineSettings
from .environment import Given
from .findings import Finding, did_you_mean
from .values import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import JsonValue

_LEVEL = re.compile(r"-O=?(?P<level>.*)")
_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(slots=True)
class Flags:
    """What the flags say."""

    settings: dict[str, Given] = field(default_factory=dict)
    extra: dict[str, JsonValue] = field(default_factory=dict)
    """Arguments that are no setting of ours."""
    notices: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    nested: dict[Argument, dict[str, Any]] = field(default_factory=dict)
    """Arguments given piece by piece (``--a.b 1 --a.c 2``), put together when all are read."""


def read_flags(words: Sequence[str]) -> Flags:
    """Sort the flags. A later one wins; those of a ``--config`` file come before all others, as in vLLM."""
    flags = Flags()
    queue = deque(_with_config(list(words), flags))
    while queue:
        word = queue.popleft()
        if word.startswith("-"):
            _read_flag(word, queue, flags)
        else:
            _read_model(word, flags)
    for argument, value in flags.nested.items():
        _assign(argument, argument.flag, value, flags)
    return flags


def _read_model(word: str, flags: Flags) -> None:
    origin = "model argument"
    given = flags.settings.get("FAIRGATE_ENGINE__MODEL")
    if given is not None and given.origin == origin:
        flags.findings.append(Finding(word, f"Does not belong to a flag, and the model is {given.text}."))
    else:
        flags.settings["FAIRGATE_ENGINE__MODEL"] = Given(word, origin)


def _read_flag(word: str, queue: deque[str], flags: Flags) -> None:
    """One flag and the values that follow it."""
    spelling, equals, text = _long_level(word).partition("=")
    inline = text if equals else None
    head, dot, path = spelling.partition(".")
    if head.startswith("--"):
        head = head.replace("_", "-")
    argument = arguments_by_flag().get(head)
    if argument is None:
        flags.findings.append(_unknown(head))
        list(_values(queue, None))  # or each would be a finding of its own
    elif not argument.takes_value and inline is None:
        _assign(argument, head, not head.startswith("--no-"), flags)
    elif not argument.takes_value:
        flags.findings.append(Finding(head, f"Takes no value: {argument.flag}, or nothing."))
    elif argument.kind == "list":
        _assign(argument, head, list(_values(queue, inline)), flags)
    else:
        value = inline if inline is not None else next(_values(queue, None, most=1), None)
        if value is None:
            flags.findings.append(Finding(head, "A value is missing after it."))
        elif dot:
            _put(flags.nested.setdefault(argument, {}), path, value)
        else:
            _assign(argument, head, value, flags)


def _values(queue: deque[str], inline: str | None, most: int | None = None) -> Iterator[str]:
    """The values of a flag, taken from the queue as they are asked for."""
    if inline is not None:
        yield inline
    while queue and most != 0 and (not queue[0].startswith("-") or _NUMBER.fullmatch(queue[0])):
        yield queue.popleft()
        most = None if most is None else most - 1


def _long_level(word: str) -> str:
    """``-O3`` is short for ``--optimization-level=3``."""
    found = _LEVEL.fullmatch(word)
    if found is None:
        return word
    return "--optimization-level" + (f"={found['level']}" if found["level"] else "")


def _put(tree: dict[str, Any], path: str, text: str) -> None:
    """Set ``a.b`` in nested objects; ``a+`` adds to a list."""
    *outer, last = path.removesuffix("+").split(".")
    for key in outer:
        inner = tree.setdefault(key, {})
        tree = inner if isinstance(inner, dict) else tree.setdefault(key, {})
    if path.endswith("+"):
        tree.setdefault(last, []).extend(text.split(","))
    else:
        tree[last] = _json_value(text)


def _json_value(text: str) -> JsonValue:
    """As vLLM reads it: JSON, a size such as ``80g``, or text."""
    for read in (json.loads, parse_count):
        try:
            value: JsonValue = read(text)
            return value
        except ValueError:
            continue
    return text


def _assign(argument: Argument, spelling: str, value: JsonValue, flags: Flags) -> None:
    """Put a value where it belongs."""
    name = argument.name
    if name in EngineSettings.own_arguments():
        flags.settings[f"FAIRGATE_ENGINE__{name.upper()}"] = Given(_text(value), f"flag {spelling}")
    elif name in RENAMED:
        if name == "disable_fastapi_docs":
            value = not value
        flags.settings[RENAMED[name]] = Given(_text(value), f"flag {spelling}")
    elif name in REFUSED:
        # What asks for the state that is anyway (one process, a switch off) may stay in a script.
        if value not in (False, "1"):
            flags.findings.append(Finding(spelling, f"Not offered: {REFUSED[name]}."))
    elif name in IDLE:
        flags.notices.append(f"{spelling} has no effect: {IDLE[name]}.")
    else:
        flags.extra[name] = value


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unknown(head: str) -> Finding:
    if head in ("--workers", "-w"):
        return Finding(head, f"Not offered: {REFUSED['api_server_count']}.")
    remedy = did_you_mean(head, arguments_by_flag(), "fairgate serve takes the flags of vllm serve.")
    return Finding(head, "vLLM has no such flag.", remedy=remedy)


def _with_config(words: list[str], flags: Flags) -> list[str]:
    """Replace ``--config FILE`` by the flags that the file stands for."""
    for index, word in enumerate(words):
        head, equals, path = word.partition("=")
        if head == "--config":
            rest = words[index + 1 :] if equals else words[index + 2 :]
            path = path if equals else next(iter(words[index + 1 : index + 2]), "")
            return _config_words(Path(path), flags) + words[:index] + rest
    return words


def _config_words(path: Path, flags: Flags) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        flags.findings.append(
            Finding(f"--config {path}", "Must be a YAML file of argument names and values.")
        )
        return []
    return [word for name, value in content.items() for word in _config_entry(str(name), value)]


def _config_entry(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)] if value else []
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]
