"""What is wrong with the settings, gathered and told at once.

Owns `Finding` and `SettingsError`. ``environment.py``, ``flags.py`` and ``load.py`` make findings;
``fairgate serve`` and ``fairgate check`` print the error and exit with 2.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and what would be right."""

    subject: str
    """The variable, flag or file at fault."""
    problem: str
    value: str | None = None
    """As it was given; already masked if it is a secret."""
    origin: str | None = None
    """Where it was given."""
    remedy: str | None = None
    """What would work."""

    def __str__(self) -> str:
        given = "" if self.value is None else f"={self.value}"
        where = "" if self.origin is None else f" ({self.origin})"
        remedy = "" if self.remedy is None else f"\n    {self.remedy}"
        return f"  {self.subject}{given}{where}\n    {self.problem}{remedy}"


class Judged(ValueError):
    """Raised by a setting's validator where its words say all; other errors are told by the allowed form."""


class SettingsError(Exception):
    """The settings cannot be used. Its text lists every finding."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        lines = "\n".join(str(finding) for finding in findings)
        super().__init__(f"These settings cannot be used:\n{lines}")


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The known word that a mistyped one most resembles, if any does."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, words: Iterable[str], otherwise: str) -> str:
    """A remedy for an unknown name."""
    found = nearest(word, words)
    return f"Did you mean {found}?" if found else otherwise
