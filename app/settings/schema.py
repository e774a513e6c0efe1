"""All settings together, and what each is called in the environment.

Owns `Settings`. It reads nothing by itself, so that a test's ``Settings(engine=...)`` has the defaults and
not the developer's environment; ``load.py`` gathers the variables and hands them to `from_variables`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .engine import EngineSettings
from .groups import AdmissionSettings, AuthSettings, LogSettings, MetricsSettings, ServerSettings
from .values import as_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

PREFIX = "FAIRGATE_"


@dataclass(frozen=True, slots=True)
class Variable:
    """The environment variable of one setting."""

    name: str
    group: str
    field_name: str
    field: FieldInfo

    @property
    def default(self) -> str:
        """Its default as text; empty if it is unset or required."""
        return "" if self.field.is_required() else as_text(self.field.default)

    def value_in(self, settings: Settings) -> object:
        """Its value among the settings."""
        return getattr(getattr(settings, self.group), self.field_name)


class Settings(BaseSettings):
    """Every setting, checked and frozen."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", enable_decoding=False, frozen=True, extra="forbid"
    )

    engine: EngineSettings
    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    admission: AdmissionSettings = AdmissionSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller gives."""
        return (init_settings,)

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Settings:
        """Read the settings from variables, named as in the environment.

        Raises:
            pydantic.ValidationError: Some value is wrong.
        """
        source = EnvSettingsSource(cls)
        source.env_vars = {name.lower(): text for name, text in variables.items()}
        return cls(**{"engine": {}} | source())

    @classmethod
    def rows(cls) -> Iterator[tuple[str, str, str]]:
        """Variable, default and description of every setting, in reading order."""
        for variable in variables().values():
            yield variable.name, variable.default, variable.field.description or ""


@cache
def variables() -> Mapping[str, Variable]:
    """Every variable that is a setting, by name."""
    return {
        variable.name: variable
        for group, outer in Settings.model_fields.items()
        for variable in _variables_of(group, outer.annotation)
    }


def _variables_of(group: str, model: object) -> Iterator[Variable]:
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    for name, field in model.model_fields.items():
        yield Variable(f"{PREFIX}{group}__{name}".upper(), group, name, field)


def markdown_table() -> str:
    """Every setting as a table for README."""
    lines = ["| Variable | Default | What it is |", "| --- | --- | --- |"]
    for name, default, description in Settings.rows():
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {shown} | {_cell(description)} |".replace("  ", " "))
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
