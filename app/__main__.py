"""The command ``fairgate``: reads the command line, loads the settings, and calls what is asked for.

Nothing heavy is imported here: a wrong setting is answered before torch is loaded. Each subcommand's work
is in ``app/commands``; ``serve`` is imported only when it runs.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from .commands.keys import keys
from .settings import Loaded, SettingsError, load_settings

BAD_SETTINGS = 2
"""Exit status for settings that cannot be used; the same as for a wrong command line."""

cli = typer.Typer(
    name="fairgate",
    help="Serve a language model to many tenants from one process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.add_typer(keys, name="keys")

# vLLM's flags are ours to judge, also those before which someone forgot the "--".
_TAKES_VLLM_FLAGS = {"ignore_unknown_options": True}

EnvFiles = Annotated[
    list[Path] | None,
    typer.Option("--env-file", metavar="FILE", help="Read settings from this file; may be repeated."),
]
VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- FLAGS]", help="Model and flags of vllm serve; they win over all settings."),
]


def _print_version(asked: bool) -> None:
    if asked:
        try:
            print(metadata.version("fairgate"))
        except metadata.PackageNotFoundError:
            print("a checkout that is not installed")
        raise typer.Exit


@cli.callback()
def fairgate(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve a language model to many tenants from one process."""


@cli.command(context_settings=_TAKES_VLLM_FLAGS)
def serve(env_file: EnvFiles = None, flags: VllmFlags = None) -> None:
    """Start the engine and the gateway."""
    loaded = _load(env_file, flags)
    for notice in loaded.notices:
        typer.echo(f"Notice: {notice}", err=True)
    loaded.apply(os.environ)
    from .commands.serve import serve as run

    run(loaded.settings)


@cli.command(context_settings=_TAKES_VLLM_FLAGS)
def check(
    env_file: EnvFiles = None,
    flags: VllmFlags = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the effective configuration, and where each value comes from."""
    from .commands.check import check as run

    run(_load(env_file, flags), as_json=as_json)


def _load(env_files: list[Path] | None, flags: list[str] | None) -> Loaded:
    """The settings, or the end: everything that is wrong with them on standard error."""
    try:
        return load_settings(os.environ, env_files or (), flags or ())
    except SettingsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_SETTINGS) from None


def main() -> None:
    """Entry point of the installed command."""
    cli()


if __name__ == "__main__":
    main()
