"""A YAML text with its places: plain data, and the line on which each value stands.

Owns `Document` and `TenantsError`, the one error of this package. ``book.py`` reads data and lines
from it; ``splice.py`` reads the positions of nodes, so as to change a few lines and leave the rest.

Two things always hold. Dates stay text, as the schema wants them. And no message quotes what could
be a key that someone pasted into the wrong field: see `shown`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

if TYPE_CHECKING:
    from collections.abc import Sequence

FieldPath: TypeAlias = "tuple[str | int, ...]"

LONGEST_SHOWN = 24
"""Characters. Keys are longer (LiteLLM's have 25, ours 46), dates and numbers are not."""


class TenantsError(Exception):
    """The tenants file cannot be read, is wrong, or cannot be changed. The text is for people."""


class _Constructor(SafeConstructor):
    """Plain Python values, dates left as they were written."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed YAML text. `root` is ``None`` where the text holds nothing but comments."""

    text: str
    name: str
    data: Any
    root: Node | None

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Parse one document.

        Raises:
            TenantsError: Not YAML; with the line, and without quoting it.
        """
        yaml = YAML(typ="safe", pure=True)  # pure: the C parser's nodes carry no positions
        yaml.Constructor = _Constructor
        try:
            root = yaml.compose(text)
            data = None if root is None else yaml.constructor.construct_document(root)
        except MarkedYAMLError as error:
            raise TenantsError(_syntax_problem(error, name)) from None
        except (YAMLError, ValueError) as error:
            raise TenantsError(f"{name}: is not valid YAML ({type(error).__name__})") from None
        return cls(text, name, data, root)

    def node(self, path: FieldPath) -> Node | None:
        """The node at a path, or ``None``."""
        node = self.root
        for part in path:
            node = child(node, part)
        return node

    def place(self, path: FieldPath) -> str:
        """Where a path stands: ``config/tenants.yaml:12: tenants[0].weight``."""
        node = self.root
        for part in path:  # as far as it goes: a missing field is reported where it should be
            deeper = child(node, part)
            if deeper is None:
                break
            node = deeper
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        return f"{self.name}{line}: {dotted(path)}".removesuffix(": ")


def child(node: Node | None, part: str | int) -> Node | None:
    """What stands in a mapping under a name, or in a list at an index; ``None`` if nothing does."""
    if isinstance(node, MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        found: Node = node.value[part]
        return found
    return None


def dotted(path: Sequence[str | int]) -> str:
    """A path as people write it: ``tenants[0].keys[2].sha256``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def shown(path: FieldPath, value: object) -> str:
    """A value for a message, ``" = 0"``, or nothing where it could hold a secret."""
    if path[-1:] == ("sha256",) or isinstance(value, dict | list):
        return ""
    text = repr(value)
    return f" = {text}" if len(text.strip("'")) <= LONGEST_SHOWN else ""


def _syntax_problem(error: MarkedYAMLError, name: str) -> str:
    # ruamel's own text quotes the line, and for a repeated name both values.
    problem = str(error.problem or error.context or "unreadable").partition(" with value")[0]
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{name}{line}: is not valid YAML: {problem}"
