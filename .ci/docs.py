"""Checks the documentation: links lead somewhere, words mean one thing, decisions have five parts.

Prints one line for each thing that is wrong, and exits with 1 if there was any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ADR_PARTS = (
    "Situation",
    "Choice",
    "Why not the others",
    "What it costs",
    "How we would notice it was wrong",
)


def pages() -> list[Path]:
    """Every page that is ours, README first."""
    return [
        ROOT / "README.md",
        *sorted(p for p in (ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ]


def anchors(page: Path) -> set[str]:
    """What `#...` may name in a page, as code hosts render headings."""
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower()
        names.add(plain.replace(" ", "-"))
    return names


def broken_links() -> list[str]:
    """Relative links whose file or heading is not there."""
    wrong = []
    for page in pages():
        for target in LINK.findall(FENCE.sub("", page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists():
                wrong.append(f"{page.relative_to(ROOT)}: {target} is not there")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                wrong.append(f"{page.relative_to(ROOT)}: {target} names no heading")
    return wrong


def orphans() -> list[str]:
    """Pages to which no other page leads."""
    linked = set()
    for page in pages():
        for target in LINK.findall(page.read_text()):
            linked.add((page.parent / target.partition("#")[0]).resolve())
            if target.endswith("/"):
                linked.update((page.parent / target).resolve().glob("*.md"))
    return [
        f"{page.relative_to(ROOT)}: no page leads here"
        for page in pages()[1:]
        if page.resolve() not in linked and page.parent.name != "newsfragments"
    ]


def glossary() -> list[str]:
    """Each word once, in alphabetical order."""
    page = ROOT / "docs" / "glossary.md"
    words = re.findall(r"^\*\*(.+?)\*\*", page.read_text(), re.MULTILINE)
    wrong = [
        f"docs/glossary.md: {word!r} twice"
        for word, n in Counter(w.lower() for w in words).items()
        if n > 1
    ]
    if words != sorted(words, key=str.lower):
        first = next(a for a, b in zip(words, sorted(words, key=str.lower), strict=True) if a != b)
        wrong.append(f"docs/glossary.md: {first!r} breaks the alphabetical order")
    if len(words) < 10:
        wrong.append("docs/glossary.md: hardly a word is explained")
    return wrong


def decisions() -> list[str]:
    """Each record has its parts and stands in the index."""
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text()
    wrong = []
    for page in sorted(folder.glob("[0-9]*.md")):
        text = page.read_text()
        missing = [
            part
            for part in ADR_PARTS
            if not re.search(rf"^(#+ |\*\*){part}", text, re.MULTILINE | re.IGNORECASE)
        ]
        wrong += [f"docs/adr/{page.name}: no part {part!r}" for part in missing]
        if page.name not in index:
            wrong.append(f"docs/adr/README.md: {page.name} is missing in the index")
    return wrong


def make_targets() -> list[str]:
    """`make x` in a page names a target of the Makefile."""
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for page in pages():
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
        wrong += [
            f"{page.relative_to(ROOT)}: `make {name}` is no target"
            for name in named
            if name not in known
        ]
    return wrong


def main() -> int:
    """Print what is wrong."""
    wrong = [
        line
        for check in (broken_links, orphans, glossary, decisions, make_targets)
        for line in check()
    ]
    for line in wrong:
        print(line)
    tracked = subprocess.run(
        ["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    print(
        f"{len(pages())} pages, {len(tracked.split())} files under docs/, {len(wrong)} complaints"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
