"""Habits of the project that a reviewer need not check by eye."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pegaflow
from pegaflow import config

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(pegaflow.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

LINES_MAX = 60
LONGER_WITH_REASON: dict[str, str] = {}
"""``file.py:function`` -> why it is better in one piece."""

METHODS_OF_OTHERS = {
    "rpc/kjloop.py": "asyncio's and pycapnp's names; what they have to do is said there",
    "rpc/transport.py": "asyncio's names",
    "rpc/server.py": "the schema's methods; its comments are the contract",
}
"""Files whose methods implement an interface that is documented elsewhere."""

PATIENT = {"vllm/runner.py": "runs inside an engine's process, whose threads it can only poll"}
"""Test files that may wait for a length of time."""

POLICY_WITHOUT_MACHINE: dict[str, str] = {"figures": "values without behaviour"}
"""Policy modules without state, with the reason why a state machine would say nothing."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parsed(files: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in files:
        yield path, ast.parse(path.read_text())


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_functions_fit_one_screen() -> None:
    long = {
        f"{path.name}:{node.name}": length(node)
        for path, tree in parsed(SOURCES)
        for node in functions(tree)
        if length(node) > LINES_MAX
    }
    assert sorted(long) == sorted(LONGER_WITH_REASON), long


def has_public_name(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    )  # fmt: skip


def test_public_names_have_docstrings() -> None:
    """Module level and one level into classes; what repeats another definition is exempt."""
    silent = []
    for path, tree in parsed(SOURCES):
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        foreign = str(path.relative_to(PACKAGE)) in METHODS_OF_OTHERS
        public = [node for node in classes if has_public_name(node) and not foreign]
        for body in (tree.body, *(node.body for node in public)):
            for node in body:
                if not has_public_name(node):
                    continue
                assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                exempt = {"overload", "override", "setter"} & {
                    name.id if isinstance(name, ast.Name) else getattr(name, "attr", "")
                    for name in node.decorator_list
                }
                declared_only = ast.unparse(node.body[-1]) == "..."  # of somebody else's class
                if ast.get_docstring(node) is None and not exempt and not declared_only:
                    silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert not silent, silent


def test_every_policy_module_has_a_state_machine() -> None:
    missing = []
    for path in sorted((PACKAGE / "policy").glob("[a-z]*.py")):
        if path.stem in POLICY_WITHOUT_MACHINE:
            continue
        test = ROOT / "tests" / "policy" / f"test_{path.stem}.py"
        text = test.read_text() if test.exists() else ""
        if "RuleBasedStateMachine" not in text:
            missing.append(path.stem)
    assert not missing, missing


def test_every_schema_method_is_in_the_protocol_page() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    methods = {
        name
        for path in (ROOT / "schema").glob("*.capnp")
        for name in re.findall(r"^\s+(\w+) @\d+ \(.*\) -> \(", path.read_text(), re.MULTILINE)
    }
    assert len(methods) >= 12, methods
    missing = sorted(name for name in methods if not re.search(rf"`(\w+\.)?{name}\b", page))
    assert not missing, missing


def test_every_setting_is_in_the_operations_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    missing = [
        option.name
        for option in config.OPTIONS
        if f"`--{option.name}" not in page or f"`{option.variable}`" not in page
    ]
    assert not missing, missing


def metric_names() -> set[str]:
    """Every string of the package that is wholly a metric's name."""
    pattern = re.compile(r"(vllm:)?pegaflow_[a-z0-9_]+")
    return {
        node.value
        for path, tree in parsed(SOURCES)
        if path.parent.name in {"observe", "node", "connector", "vllm"}
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and pattern.fullmatch(node.value)
    }


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = metric_names()
    assert len(names) >= 10, names
    missing = sorted(name for name in names if f"`{name}" not in page)
    assert not missing, missing


def test_every_metric_of_the_connector_is_documented() -> None:
    """Its table needs vLLM to be imported, so it is read as text."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    tree = ast.parse((PACKAGE / "connector" / "vllm" / "stats.py").read_text())
    names = {
        node.args[2].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "Metric"
        and isinstance(node.args[2], ast.Constant)
        and isinstance(node.args[2].value, str)
    }
    assert len(names) >= 10, names
    missing = sorted(name for name in names if f"`vllm:pega_{name}`" not in page)
    assert not missing, missing


def test_no_sleep_in_tests_without_a_reason() -> None:
    """A test that waits a while is slow, or wrong on a slow day.  ``# sleep: why`` excuses it."""
    found = []
    for path, tree in parsed(TESTS):
        if str(path.relative_to(ROOT / "tests")) in PATIENT:
            continue
        lines = path.read_text().splitlines()
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"time.sleep", "sleep"}
            and "# sleep: " not in lines[node.lineno - 1]
        ]
    assert not found, found


def tracked_files() -> list[Path]:
    """What belongs to the project; without git, what lies in its folders."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    folders = ("pegaflow", "tests", "fuzz", "benchmarks", "docs", "examples", "schema", ".ci")
    return [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]


def test_no_machine_or_registry_is_named() -> None:
    """Whoever clones this has other folders, mirrors and registries."""
    words = ["pypi" + ".org", "python" + "hosted", "download.py" + "torch", "/opt" + "/wheels"]
    words += ["/root" + "/", "/work" + "/", "deb" + "ian.org", "npm" + "js"]
    found = []
    for path in tracked_files():
        if path.suffix in {".png", ".jsonl", ".bin"} or path.name == "LICENSE":
            continue
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found, found


def test_exceptions_to_checkers_have_a_reason() -> None:
    """``# noqa: X`` and ``# type: ignore[x]`` name their code and say why, maybe a line above."""
    bare = []
    pattern = re.compile(r"# (noqa: [A-Z0-9, ]+|type: ignore\[[a-z-, ]+\])(?P<rest>.*)")
    for path in SOURCES:
        above = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"# (noqa|type: ignore)(?![:\[])", line):
                bare.append(f"{path.name}:{number} names no code")
            match = pattern.search(line)
            explained = above.strip().startswith("#") or re.search(
                r"\w", match["rest"] if match else ""
            )
            if match and not explained:
                bare.append(f"{path.name}:{number} gives no reason")
            above = line
    assert not bare, bare


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout
    assert "kept, 0 broken" in answer.stdout
