"""The command ``pegaflow``: start a daemon, or ask one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from pegaflow import __version__
from pegaflow.errors import ConfigError, PegaflowError
from pegaflow.model.address import DEFAULT_HOST, DEFAULT_PORT, parse_address
from pegaflow.model.units import format_size
from pegaflow.node.cli import build_command, settings_of, settings_params

if TYPE_CHECKING:
    from pegaflow.client.blocking import BlockingNode
    from pegaflow.model.messages import Health

T = TypeVar("T")
POLL_SECONDS = 0.05


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """PegaFlow: the KV cache of an inference host as a service."""


main.add_command(build_command("server"))

_address = click.option(
    "--addr",
    metavar="ADDRESS",
    default=None,
    help=f"HOST:PORT or unix:/path. [PEGAFLOW_ADDR, else {DEFAULT_HOST}:{DEFAULT_PORT}]",
)
_timeout = click.option(
    "--timeout-secs", type=click.FloatRange(0.01, 3600), default=5.0, show_default=True
)


def _ask(addr: str | None, timeout_s: float, question: Callable[[BlockingNode], T]) -> T:
    """One question to the daemon; raises of the error tree."""
    from pegaflow.client.blocking import BlockingNode  # late: --help need not load Cap'n Proto

    text = addr or os.environ.get("PEGAFLOW_ADDR", "").split(",")[0]
    address = parse_address(text or f"{DEFAULT_HOST}:{DEFAULT_PORT}")
    with BlockingNode(address, timeout_s) as node:
        return question(node)


def _answer(addr: str | None, timeout_s: float, question: Callable[[BlockingNode], T]) -> T:
    try:
        return _ask(addr, timeout_s, question)
    except PegaflowError as exc:
        _fail(exc)


def _fail(exc: PegaflowError) -> NoReturn:
    click.echo(f"pegaflow: {exc}", err=True)
    sys.exit(2 if isinstance(exc, ConfigError) else 1)


def _wait_for_health(addr: str | None, timeout_s: float, end: float) -> Health:
    """The answer once it is ready, or the last one before ``end``."""
    while True:
        try:
            found = _ask(addr, timeout_s, lambda node: node.health(timeout_s))
            if found.ready or time.monotonic() >= end:
                return found
        except PegaflowError as exc:
            if time.monotonic() >= end or isinstance(exc, ConfigError):
                _fail(exc)
        time.sleep(POLL_SECONDS)


@main.command()
@_address
@_timeout
@click.option(
    "--wait-secs",
    type=click.FloatRange(0, 86400),
    default=0.0,
    help="Ask again until it is ready, for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def health(addr: str | None, timeout_secs: float, wait_secs: float, as_json: bool) -> None:
    """Is the daemon ready?  Exits with 0 if it is, else with 1."""
    found = _wait_for_health(addr, timeout_secs, time.monotonic() + wait_secs)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "ready": found.ready,
                    "version": found.version,
                    "boot_id": found.boot_id.hex(),
                    "pool_ready_bytes": found.pool_ready_bytes,
                    "pool_total_bytes": found.pool_total_bytes,
                }
            )
        )
    else:
        click.echo(
            f"{'ready' if found.ready else 'not ready'}: version {found.version}, pool "
            f"{format_size(found.pool_ready_bytes)} of {format_size(found.pool_total_bytes)}"
        )
    sys.exit(0 if found.ready else 1)


@main.command()
@_address
@_timeout
@click.option("--json", "as_json", is_flag=True, help="One JSON object, as the daemon gave it.")
def stats(addr: str | None, timeout_secs: float, as_json: bool) -> None:
    """Numbers of a running daemon."""
    text = _answer(addr, timeout_secs, lambda node: node.statistics(timeout_secs))
    if as_json:
        click.echo(text)
        return
    numbers: dict[str, object] = json.loads(text)
    width = max(map(len, numbers), default=0)
    for name, value in sorted(numbers.items()):
        shown = format_size(value) if name.endswith("_bytes") and isinstance(value, int) else value
        click.echo(f"{name:{width}}  {shown}")


@main.command()
@_address
@_timeout
@click.option(
    "--grace-secs",
    type=click.FloatRange(0, 3600),
    default=10.0,
    show_default=True,
    help="How long calls in flight may take.",
)
def shutdown(addr: str | None, timeout_secs: float, grace_secs: float) -> None:
    """Ask the daemon of this host to drain and exit."""
    grace_ms = round(grace_secs * 1000)
    _answer(addr, timeout_secs, lambda node: node.shutdown(grace_ms, timeout_secs))
    click.echo("the daemon drains")


@click.pass_context
def _doctor(context: click.Context, /, as_json: bool, **_: object) -> None:
    import attrs  # late, as all that follows: --help need not wait for it

    from pegaflow.node import doctor

    config = settings_of(context).config
    cuda = doctor.look_for_cuda(config) if config.devices != () else doctor.Cuda()
    findings = doctor.examine(config, doctor.Limits.of_this_process(), cuda)
    if as_json:
        click.echo(json.dumps([attrs.asdict(found) for found in findings]))
    else:
        width = max(len(found.what) for found in findings)
        for found in findings:
            click.echo(f"{found.verdict:8} {found.what:{width}}  {found.detail}")
            if found.fix:
                click.echo(f"{'':8} {'':{width}}  fix: {found.fix}")
        click.echo(doctor.summary(findings))
    sys.exit(1 if any(found.verdict == "problem" for found in findings) else 0)


main.add_command(
    click.Command(
        "doctor",
        params=[
            *settings_params(),
            click.Option(["--json", "as_json"], is_flag=True, help="A JSON list of findings."),
        ],
        callback=_doctor,
        help="Does this host allow a daemon with these settings?  Exits with 1 if something does "
        "not.  Takes the flags of `pegaflow server`, and starts nothing.",
        context_settings={"max_content_width": 100},
    )
)


if __name__ == "__main__":
    main(prog_name="pegaflow")
