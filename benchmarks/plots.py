"""Draws the committed results: `python -m benchmarks.plots` writes docs/images/."""

from __future__ import annotations

import json

from benchmarks.gpu_transfer import SIZES
from benchmarks.harness import RESULTS, ROOT, Figure

IMAGES = ROOT / "docs" / "images"


def last(name: str) -> dict[str, Figure]:
    """The newest kept result of a benchmark."""
    result: dict[str, Figure] = json.loads((RESULTS / f"{name}.jsonl").read_text().splitlines()[-1])
    return result


def gpu_transfer() -> None:
    """GB/s against the size of a range, idle and beside a model, with the link as the limit."""
    from matplotlib import pyplot

    result = last("gpu_transfer")
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for direction, colour in (("save", "tab:blue"), ("load", "tab:orange")):
        for state, style in (("idle", "-o"), ("loaded", "--s")):
            keys = {s: f"{direction}_{label}_random_{state}_gbps" for label, s in SIZES.items()}
            points = [(size, result[key]) for size, key in keys.items() if key in result]
            label = f"{direction}, {'GPU idle' if state == 'idle' else 'model computing'}"
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
    for name, text in (("link_d2h_gbps", "raw 2 GiB copy to the host"),):
        limit = result[name]
        assert isinstance(limit, float)
        axes.axhline(limit, color="gray", linewidth=1, label=text)
    axes.set(xscale="log", ylim=(0, 60), xlabel="bytes of one range", ylabel="GB/s")
    ticks = list(SIZES.values())
    axes.set_xticks(ticks, [label.upper() for label in SIZES], rotation=45)
    axes.minorticks_off()
    axes.set_title(f"1.2 GiB in random blocks, one call at a time ({result['card']})")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / "gpu_transfer.svg", metadata={"Date": None})


if __name__ == "__main__":
    gpu_transfer()
