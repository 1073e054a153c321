"""The command ``pegaflow-server``: settings in, a running daemon or one sentence out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from pegaflow import __version__
from pegaflow.config import OPTIONS, Option, Settings, resolve
from pegaflow.errors import ConfigError
from pegaflow.observe import log

EXIT_REFUSED = 2
"""Nothing was started: a setting is wrong or does not fit this machine."""

HELP = """Run the daemon that owns the KV cache of this host.

Each setting can also come from an environment variable (--pool-size: PEGAFLOW_POOL_SIZE) or from a
TOML file (pool-size = "30gb"). A flag wins over the environment, the environment over the file.
"""


def _flag(option: Option[object]) -> click.Option:
    default = f"  [{option.default}]" if option.default else ""
    if not option.metavar:
        return click.Option(
            [f"--{option.name}/--no-{option.name}"], help=option.help, default=False
        )
    return click.Option(
        [f"--{option.name}"],
        metavar=option.metavar,
        help=option.help + default,
        multiple=option.repeatable,
    )


def _given(context: click.Context) -> dict[str, str]:
    """The flags that are on the command line, as text by option name."""
    out: dict[str, str] = {}
    for option in OPTIONS:
        name = option.name.replace("-", "_")
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            out[option.name] = "true" if value else "false"
        else:
            out[option.name] = ",".join(value) if option.repeatable else str(value)
    return out


def _refuse(message: str) -> NoReturn:
    print(f"pegaflow-server: {message}", file=sys.stderr)  # noqa: T201 - before there is a log
    raise SystemExit(EXIT_REFUSED)


def _with_source(error: ConfigError, settings: Settings) -> str:
    """A sentence about --x, with the place where x was set if that is not the flag."""
    sources = [
        f"{name} comes from {setting.source}"
        for name, setting in settings.by_name.items()
        if f"--{name}" in str(error) and not setting.source.startswith("flag ")
    ]
    return f"{error} ({'; '.join(sources)})" if sources else str(error)


def _announce(settings: Settings) -> None:
    fields: dict[str, object] = {
        name.replace("-", "_"): setting.text
        for name, setting in settings.by_name.items()
        if setting.source != "the default"
    }
    log.info("config.effective", version=__version__, pid=os.getpid(), **fields)
    for sentence in settings.overridden:
        log.warning("config.overridden", detail=sentence)
    for name, addresses in (
        ("addr", settings.config.addresses),
        ("http-addr", (settings.config.http_address,)),
    ):
        for address in addresses:
            if not address.is_local:
                log.warning("config.reachable_without_password", setting=name, address=address)


def _print_settings(settings: Settings) -> None:
    table = {
        name: {"value": setting.text, "source": setting.source}
        for name, setting in settings.by_name.items()
    }
    click.echo(json.dumps(table, indent=1))


@click.pass_context
def _start(context: click.Context, /, **_: object) -> None:
    if not __debug__:
        _refuse(
            "python -O takes the assertions out that keep wrong bytes from an engine: "
            "start without -O and PYTHONOPTIMIZE"
        )
    settings = settings_of(context)
    if context.params["check_config"]:
        _print_settings(settings)
        return
    log.configure(settings.config.log_level, as_json=settings.config.log_format == "json")
    _announce(settings)
    # Only now: --help and a refusal need not wait for NumPy and Cap'n Proto.
    from pegaflow.node import daemon

    try:
        code = daemon.run(settings.config)
    except ConfigError as exc:
        _refuse(_with_source(exc, settings))
    raise SystemExit(code)


def settings_params() -> list[click.Parameter]:
    """Every setting as a flag, and the file."""
    file = click.Option(
        ["--config"], metavar="PATH", help="A TOML file with any of these settings by name."
    )
    return [*(_flag(option) for option in OPTIONS), file]


def settings_of(context: click.Context) -> Settings:
    """What flags, environment and file of this command line say.  Refuses in one sentence."""
    file = context.params["config"] or os.environ.get("PEGAFLOW_CONFIG") or None
    try:
        return resolve(_given(context), os.environ, Path(file) if file else None)
    except ConfigError as exc:
        _refuse(str(exc))


def build_command(name: str) -> click.Command:
    """The command under a name of the caller's choice."""
    check = click.Option(
        ["--check-config"],
        is_flag=True,
        help="Print each setting with its source as JSON and exit.",
    )
    command = click.Command(
        name,
        params=[*settings_params(), check],
        callback=_start,
        help=HELP,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    return click.version_option(__version__)(command)


def main() -> None:
    """Entry point of ``pegaflow-server``."""
    build_command("pegaflow-server")(prog_name="pegaflow-server")


if __name__ == "__main__":
    main()
