"""Structured log lines, as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from pegaflow.observe import log


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("pegaflow")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_json_lines_have_time_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", as_json=True)
    log.info("lease.expired", blocks=3, token=b"\x01\xff", why=OSError("x"), none=None)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "info",
        "event": "lease.expired",
        "blocks": 3,
        "token": "01ff",
        "why": "x",
        "none": None,
    }


def test_console_lines_are_one_line_even_with_hostile_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure("info")
    log.info("session.opened", client="evil\nerror   forged.event\x1b[31m", instance="a b")
    (line,) = capsys.readouterr().err.splitlines()
    assert "session.opened" in line
    assert "\x1b" not in line
    assert "instance='a b'" in line


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warn")
    log.info("quiet")
    log.warning("loud")
    log.set_level("trace")
    log.debug("detail")
    events = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert events == ["loud", "detail"]


@pytest.mark.parametrize("as_json", [False, True])
def test_errors_carry_their_traceback(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", as_json=as_json)
    try:
        int("no number")
    except ValueError as exc:
        log.error("rpc.internal_error", exc=exc, method="save")
    text = capsys.readouterr().err
    assert "ValueError: invalid literal" in text
    assert "method" in text
