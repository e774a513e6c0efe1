"""Loads the settings: files, then the environment, then flags; checks all, and tells all findings at once.

Called by the commands, before torch is imported and before anything else reads the environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue, ValidationError

from .environment import Given, files_to_read, gather
from .findings import Finding, Judged, SettingsError
from .flags import read_flags
from .schema import Settings, Variable, variables
from .values import MASK, as_text, form_of, is_secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
    from pathlib import Path

_EXTRA = "FAIRGATE_ENGINE__EXTRA"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings that can be used, and what is to be said about them."""

    settings: Settings
    origins: Mapping[str, str]
    """Where each variable's value was given; a variable that is not here has its default."""
    notices: tuple[str, ...]
    """What was ignored, and why: for standard error."""
    for_engine: Mapping[str, str]
    """Variables from files that the engine's processes read."""
    removed: frozenset[str]
    """Variables that would mislead the engine's processes."""

    def effective(self) -> Iterator[tuple[str, str, str]]:
        """Variable, value in use (secrets masked), and origin of every setting."""
        for name, variable in variables().items():
            yield name, as_text(variable.value_in(self.settings)), self.origins.get(name, "default")

    def apply(self, environ: MutableMapping[str, str]) -> None:
        """Make the environment what the engine's processes should inherit. Before vllm is imported."""
        for name in self.removed:
            environ.pop(name, None)
        for name, text in self.for_engine.items():
            environ.setdefault(name, text)
        # A setting of ours is more deliberate than a variable that happens to be there.
        environ.update(self.settings.engine.child_environment())


def load_settings(
    environment: Mapping[str, str], env_files: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Loaded:
    """Load and check the settings.

    Args:
        environment: The real environment, which wins over files.
        env_files: Files to read instead of those that the environment names (``FAIRGATE_ENV_FILE``), or
            ``.env``; a later one wins.
        flags: Flags of ``vllm serve``, which win over all.

    Raises:
        SettingsError: Something is wrong. Lists everything that is.
    """
    gathered = gather(environment, files_to_read(environment, env_files))
    from_flags = read_flags(flags)
    given = gathered.settings | from_flags.settings
    if from_flags.extra:
        given[_EXTRA] = _extended(given.get(_EXTRA), from_flags.extra)
    given = {name: value for name, value in given.items() if value.text}
    findings = gathered.findings + from_flags.findings
    try:
        settings = Settings.from_variables({name: value.text for name, value in given.items()})
    except ValidationError as error:
        findings += _findings(error, given)
    if findings:
        raise SettingsError(findings)
    return Loaded(
        settings=settings,
        origins={name: value.origin for name, value in given.items()},
        notices=(*gathered.notices, *from_flags.notices),
        for_engine=gathered.for_engine,
        removed=frozenset(gathered.removed),
    )


def _extended(base: Given | None, extra: Mapping[str, JsonValue]) -> Given:
    """The arguments of the environment and of flags together; broken JSON is left to be found so."""
    if base is None:
        return Given(json.dumps(extra), "flags")
    try:
        named = json.loads(base.text)
    except ValueError:
        return base
    if not isinstance(named, dict):
        return base
    return Given(json.dumps(named | dict(extra)), f"{base.origin}, flags")


def _findings(error: ValidationError, given: Mapping[str, Given]) -> Iterable[Finding]:
    """One finding a variable: a union's members each complain, and the first says enough."""
    places: dict[tuple[int | str, ...], Variable] = {
        (variable.group, variable.field_name): variable for variable in variables().values()
    }
    found: dict[object, Finding] = {}
    for detail in error.errors(include_url=False):
        variable = places.get(detail["loc"][:2])
        if variable is None:
            # Settings that contradict each other; the text begins with the variable at fault.
            subject, _, problem = _own_words(detail).partition(" ")
            found[detail["loc"]] = Finding(subject, problem)
        else:
            found.setdefault(variable.name, _finding(variable, detail, given.get(variable.name)))
    return found.values()


def _finding(variable: Variable, detail: Any, given: Given | None) -> Finding:
    form = form_of(variable.field)
    example = variable.default or form.example
    remedy = f"For example {variable.name}={example}" if example else None
    if given is None:
        return Finding(variable.name, f"Is required: {form.words}.", remedy=remedy)
    problem = f"must be {form.words}"
    if detail["type"] == "value_error":
        judged = isinstance(detail["ctx"]["error"], Judged)
        problem = _own_words(detail) if judged else f"{_own_words(detail)}; {problem}"
    return Finding(
        variable.name, f"{problem[:1].upper()}{problem[1:]}.", _shown(variable, given), given.origin, remedy
    )


def _own_words(detail: Any) -> str:
    return str(detail["msg"]).removeprefix("Value error, ")


def _shown(variable: Variable, given: Given) -> str | None:
    """The value as it was given. Other arguments may hold a secret under a wrong name."""
    if variable.name == _EXTRA:
        return None
    return MASK if is_secret(variable.field) else repr(given.text)
