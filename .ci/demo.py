"""`make demo`: find or make the engine's environment, then become the demo."""

from __future__ import annotations

import argparse
import os
import sys

from environments import ROOT, EnvironmentTrouble, bin_folder, ensure, say

VLLM = "vllm-0.32.0"


def main() -> int:
    """Ends as the demo does; 1 when there is no environment for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "mock"), default="vllm")
    engine = parser.parse_args().engine
    say(f"environment for ENGINE={engine}")
    try:
        folder = ensure(VLLM if engine == "vllm" else "run")
    except EnvironmentTrouble as trouble:
        say(str(trouble))
        return 1
    python = str(bin_folder(folder) / "python")
    return os.execv(
        python, [python, str(ROOT / "examples" / "demo" / "main.py"), "--engine", engine]
    )


if __name__ == "__main__":
    sys.exit(main())
