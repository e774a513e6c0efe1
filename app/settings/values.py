"""The kinds of value that settings have, and how each is written as text.

A kind is an annotated type: it parses what stands in an environment variable, and carries a `Form`, the
words with which a wrong value is answered. Used by ``engine.py`` and ``groups.py``, which list the
settings; ``findings.py`` reads the forms back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, FilePath, JsonValue, SecretStr

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MASK = "********"

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?B)?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Form:
    """What a value may look like, in words, and one that works."""

    words: str
    example: str


def parse_count(text: str) -> int:
    """Read a whole number with an optional size, as vLLM does: ``1k`` is 1,000 and ``1K`` is 1,024.

    Also as people write bytes: ``512MiB`` (and ``512MB``, which is decimal).

    Raises:
        ValueError: It is none of these, or not a whole number.
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size")
    number, letter, unit = found.groups()
    if unit and not (letter or unit == "B"):
        raise ValueError(f"{text!r} is not a size")
    # An "iB" is binary and a "B" decimal whatever the letter's case; alone, the case decides (vLLM's rule).
    binary = unit == "iB" if unit else letter.isupper()
    count = float(number) * (1024 if binary else 1000) ** _POWERS.get(letter.lower(), 0)
    if not count.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(count)


def _size(value: object) -> object:
    return parse_count(value) if isinstance(value, str) else value


def _split(value: object) -> object:
    """``a,b`` or ``["a", "b"]``; one that starts with a bracket is meant as JSON."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _modules(value: object) -> object:
    """Adapters: like any list, and each may be ``name=path``; one JSON object is a list of one."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = [value]
    parts = _split(value)
    return [_module(part) for part in parts] if isinstance(parts, list | tuple) else parts


def _module(part: object) -> object:
    if not isinstance(part, str):
        return part
    if part.lstrip().startswith("{"):
        return json.loads(part)
    name, equals, path = part.partition("=")
    if not (name and equals and path):
        raise ValueError(f"{part!r} is not name=path")
    return {"name": name, "path": path}


def _object(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1), Form("a whole number, 1 or more", "1")]
Index = Annotated[int, Field(ge=0), Form("a whole number, 0 or more", "0")]
Port = Annotated[int, Field(ge=1, le=65535), Form("a port, a whole number from 1 to 65535", "8000")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), Form("seconds, a number of 0 or more", "30")]
Share = Annotated[
    float, Field(gt=0, le=1, allow_inf_nan=False), Form("a share above 0 and at most 1; 0.9 is 90 %", "0.85")
]
Tokens = Annotated[
    int, Field(ge=1), BeforeValidator(_size), Form("tokens, 1 or more; 32k is 32,000, 32K is 32,768", "4096")
]
Bytes = Annotated[
    int, Field(ge=1), BeforeValidator(_size), Form("bytes, 1 or more; or 1g, 512MiB (1G is 1GiB)", "512MiB")
]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split), Form("a comma-separated or a JSON list", "a,b")]
JsonObject = Annotated[
    dict[str, JsonValue], BeforeValidator(_object), Form("one JSON object", '{"max_logprobs": 5}')
]
File = Annotated[FilePath, Form("a file that exists", "/etc/fairgate/tls.crt")]
LoraModules = BeforeValidator(_modules)


def _parts(annotation: object, metadata: tuple[object, ...]) -> Iterator[object]:
    """Everything said about a type: its metadata, the type, and the same of a union's members."""
    yield from metadata
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *rest = get_args(annotation)
        yield from _parts(inner, tuple(rest))
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _parts(member, ())
    else:
        yield annotation


def form_of(field: FieldInfo) -> Form:
    """What a setting's value may look like."""
    parts = list(_parts(field.annotation, tuple(field.metadata)))
    for part in parts:
        if isinstance(part, Form):
            return part
    if bool in parts:
        return Form("true or false (or yes/no, on/off, 1/0)", "true")
    words = [str(one) for part in parts if get_origin(part) is Literal for one in get_args(part)]
    if words:
        return Form("one of " + ", ".join(words), words[0])
    return Form("text", "")


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value may never be shown."""
    return SecretStr in _parts(field.annotation, ())


def as_text(value: Any) -> str:
    """A value as an environment variable would carry it; unset is empty, a secret is masked."""
    if value is None or value == {}:
        return ""
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, tuple):
        if all(isinstance(item, str) for item in value):
            return ",".join(value)
        return json.dumps([item.model_dump(exclude_none=True) for item in value])
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
