"""Adding to a YAML list and taking from it, by changing the text and nothing else.

Owns two functions on texts, used by ``edit.py``. The places come from ruamel.yaml's nodes. Writing
the whole document back with ruamel's round trip would be shorter, but it hangs a comment on the value
before it: a key added at the end of a tenant lands below the heading of the next one, and a revoked
last key takes that heading with it. Here every line that is not the entry's stays as it is, byte for byte.

These functions trust the layout that they find; `edit` checks that the data came out as meant, so a layout
that they cannot handle (an alias, a dash on its own line) becomes an error and not a wrong file.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from .document import child

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .document import Document, FieldPath

_PLAIN = re.compile(r"[a-z][a-z0-9_.-]*[a-z][a-z0-9_.-]*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off"})


def append(document: Document, path: FieldPath, entries: Sequence[Mapping[str, str]]) -> str:
    """The text with entries at the end of the list at a path, which is made if it is not there."""
    *parent_path, name = path
    parent = document.node(tuple(parent_path))
    if not isinstance(parent, MappingNode):  # nothing but comments so far
        lines = _block(entries, "  ")
        return _insert_line(document.text, len(document.text), [f"{name}:", *lines])
    listed = child(parent, name)
    if parent.flow_style or (isinstance(listed, SequenceNode) and listed.flow_style and listed.value):
        return _append_flow(document.text, parent, str(name), listed, entries)
    column = parent.start_mark.column
    if isinstance(listed, SequenceNode) and not listed.flow_style:
        lines = _block(entries, " " * listed.start_mark.column)
        return _insert_line(document.text, _end(listed), lines)
    lines = _block(entries, " " * (column + _step(document)))
    if listed is None:
        return _insert_line(document.text, _end(parent), [f"{' ' * column}{name}:", *lines])
    # `keys:`, `keys: null` or `keys: []`: the value goes, the items follow below
    key = next(key for key, _ in parent.value if key.value == name)
    after_colon = document.text.index(":", key.end_mark.index) + 1
    text = document.text
    if not _is_void(listed):
        head = text[after_colon : listed.start_mark.index].rstrip()
        text = text[:after_colon] + head + text[listed.end_mark.index :]
    return _insert_line(text, after_colon, lines)


def remove(document: Document, path: FieldPath, index: int) -> str:
    """The text without one item of the list at a path. Comments on lines of their own all stay."""
    listed = document.node(path)
    assert isinstance(listed, SequenceNode)
    item = listed.value[index]
    text = document.text
    if listed.flow_style:
        return _remove_flow(text, listed, index)
    start = text.rfind("\n", 0, item.start_mark.index) + 1
    end = _line_end(text, _end(item))
    comments = [
        line for line in text[start:end].splitlines(keepends=True)[1:] if line.lstrip().startswith("#")
    ]
    return text[:start] + "".join(comments) + text[end:]


def _append_flow(
    text: str, parent: MappingNode, name: str, listed: Node | None, entries: Sequence[Mapping[str, str]]
) -> str:
    items = ", ".join(
        "{" + ", ".join(f"{field}: {_scalar(value)}" for field, value in entry.items()) + "}"
        for entry in entries
    )
    if isinstance(listed, SequenceNode):
        at = _end(listed.value[-1]) if listed.value else listed.start_mark.index + 1
        items = f", {items}" if listed.value else items
    else:
        at = _end(parent.value[-1][1])
        items = f", {name}: [{items}]"
    return text[:at] + items + text[at:]


def _remove_flow(text: str, listed: SequenceNode, index: int) -> str:
    items = listed.value
    start, end = items[index].start_mark.index, items[index].end_mark.index
    if index + 1 < len(items):
        end = items[index + 1].start_mark.index
    elif index > 0:
        start = items[index - 1].end_mark.index
    return text[:start] + text[end:]


def _block(entries: Sequence[Mapping[str, str]], indent: str) -> list[str]:
    lines = []
    for entry in entries:
        for number, (field, value) in enumerate(entry.items()):
            lines.append(f"{indent}{'  ' if number else '- '}{field}: {_scalar(value)}")
    return lines


def _scalar(value: str) -> str:
    """A string as YAML: bare where no parser could take it for something else, else quoted."""
    if _PLAIN.fullmatch(value) and value not in _WORDS:
        return value
    # A JSON string is a YAML string, if what YAML does not allow as it is stands escaped.
    return json.dumps(value, ensure_ascii=not value.isprintable())


def _insert_line(text: str, index: int, lines: Sequence[str]) -> str:
    """Lines below the one that holds the character before `index`."""
    newline = "\r\n" if "\r\n" in text else "\n"
    at = _line_end(text, index)
    head = text[:at]
    if head and not head.endswith("\n"):
        head += newline
    return head + newline.join(lines) + newline + text[at:]


def _line_end(text: str, index: int) -> int:
    """Where the next line begins, seen from the end of a value."""
    if index == len(text):
        return index
    return text.find("\n", index) + 1 or len(text)


def _end(node: Node) -> int:
    """Where a value ends. ruamel ends a block list where the next thing begins, comments between."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(node, SequenceNode):
            return _end(last)
        key, value = last
        return int(key.end_mark.index) if _is_void(value) else _end(value)
    return int(node.end_mark.index)


def _is_void(node: Node) -> bool:
    """A null that nobody wrote (`keys:`); ruamel places it at the next thing in the file."""
    return bool(node.start_mark.index == node.end_mark.index)


def _step(document: Document) -> int:
    """How far this file indents the dashes of a list below its name."""
    for _, value in document.root.value if isinstance(document.root, MappingNode) else ():
        if isinstance(value, SequenceNode) and not value.flow_style:
            return int(value.start_mark.column)
    return 2
