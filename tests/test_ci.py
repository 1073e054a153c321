"""The scripts behind `make test`: a check that cannot fail is none."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("checks")


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("environments")


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The documentation's checks, on a tree of ours."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    module = importlib.import_module("docs")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for name in ("docs/adr", "benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    return module


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_a_step_is_as_good_as_its_command(checks: ModuleType) -> None:
    run = checks.Checks([])
    assert run.step("fine", lambda: run.run(*python("print('hello')")))
    assert not run.step("bad", lambda: run.run(*python("raise SystemExit(3)")))
    assert not run.step("lenient", lambda: run.run(*python("pass"), expect=1))
    assert run.step("canary", lambda: run.run(*python("raise SystemExit(1)"), expect=1))
    assert run.failed == ["bad", "lenient"]


def test_trouble_with_an_environment_is_a_failed_step(
    checks: ModuleType, environments: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> bool:
        raise environments.EnvironmentTrouble("no wheels here.")

    run = checks.Checks([])
    assert not run.step("environment", work)
    assert "no wheels here." in capsys.readouterr().out


@pytest.mark.slow
def test_a_command_that_hangs_is_ended(checks: ModuleType) -> None:
    run = checks.Checks([])
    command = python("import time; print('x', flush=True); time.sleep(60)")
    assert not run.step("hangs", lambda: run.run(*command, timeout_s=1))


@pytest.mark.parametrize(
    "line",
    [
        "===== 3 passed, 1 skipped in 0.12s =====",
        "== 1 failed, 2 passed in 61.50s (0:01:01) ==",
        "12 passed in 0.50s",
    ],
)
def test_closing_lines_are_kept(checks: ModuleType, line: str) -> None:
    run = checks.Checks([])
    run.run(*python(f"print({line!r})"))
    assert run.closing == [line]


def test_no_engine_tested_is_a_failure(
    checks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pytest ends with 0 when all tests were skipped."""
    run = checks.Checks(["1.0"])
    fake = tmp_path / "pytest"
    fake.write_text("#!/bin/sh\necho '5 skipped in 0.01s'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(run, "tool", lambda name: fake)
    monkeypatch.setattr(run, "engines", lambda: ["python"])
    run.vllm()
    assert run.failed == ["pytest with real vLLM"]


def test_missing_torch_wheels_are_one_sentence(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def fails(command: list[str], log: Path, what: str) -> None:
        log.write_text("ERROR: No matching distribution found for torch==2.13.0+cpu\n")
        raise environments.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environments, "logged", fails)
    with pytest.raises(environments.EnvironmentTrouble, match="PIP_EXTRA_INDEX_URL"):
        environments.install_vllm(tmp_path / "pip", "0.32.0", log)


def test_missing_ensurepip_without_root_is_one_sentence(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(command: list[str], log: Path, what: str) -> None:
        raise environments.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environments, "logged", fails)
    monkeypatch.setattr(environments.os, "geteuid", lambda: 1000)
    with pytest.raises(environments.EnvironmentTrouble, match="python3-venv"):
        environments.create(tmp_path, tmp_path / "log")


def test_an_environment_is_made_anew_when_what_it_needs_changes(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    before = environments.environment_digest("dev"), environments.environment_digest("run")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    after = environments.environment_digest("dev"), environments.environment_digest("run")
    assert len({*before, *after}) == 4


def test_documentation_checks_find_what_is_wrong(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("test:\n")
    (tmp_path / "README.md").write_text(
        "# Read\n[gone](docs/gone.md) [g](docs/glossary.md#nothing) [adr](docs/adr/README.md)\n"
        "`make nonsense`\n"
    )
    (tmp_path / "docs/glossary.md").write_text("# Glossary\n**b** x\n**a** x\n**a** x\n")
    (tmp_path / "docs/adr/README.md").write_text("# ADR\n")
    (tmp_path / "docs/adr/0001-x.md").write_text("# X\n## Situation\n")
    assert len(docs.broken_links()) == 2
    assert docs.orphans() == ["docs/adr/0001-x.md: no page leads here"]
    assert len(docs.glossary()) == 3
    assert len(docs.decisions()) == 5
    assert docs.make_targets() == ["README.md: `make nonsense` is no target"]


def test_results_are_flat_and_kept_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    harness = importlib.import_module("benchmarks.harness")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.delenv("SAVE", raising=False)
    harness.emit({"x_ms": 1.5}, "some")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SAVE", "1")
    harness.emit({"x_ms": 2.5}, "some")
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["x_ms"] for line in printed] == [1.5, 2.5]
    assert set(json.loads(printed[-1])) == {"x_ms", "commit", "machine"}
    assert (tmp_path / "some.jsonl").read_text().splitlines() == printed[-1:]
    with pytest.raises(TypeError, match="flat"):
        harness.emit({"nested": [1]})
    assert harness.percentile([float(i) for i in range(1, 101)], 99) == 99
    assert harness.percentile([3.0, 1.0], 50) == 1.0
