"""The prompts of the demo, and what one run of an engine over them tells."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

BLOCK_TOKENS = 32
OUTPUT_TOKENS = 16
PREFIX_TOKENS = (384, 512)
TAIL_TOKENS = (24, 97, 180, 384)


def prompts() -> list[list[int]]:
    """Eight prompts of 408..896 tokens: two documents, four questions about each, taken in turn."""
    chance = random.Random(2)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(10, 990) for _ in range(count)]

    documents = [tokens(count) for count in PREFIX_TOKENS]
    return [document + tokens(count) for count in TAIL_TOKENS for document in documents]


def warm_up(phase: str) -> list[int]:
    """A prompt that no other run has: a process's first request pays for what is not ours."""
    chance = random.Random(phase)
    return [chance.randrange(10, 990) for _ in range(640)]


@dataclass
class Answer:
    """What came of one prompt.  The three counts of tokens add up to the prompt's length."""

    output: list[int]
    ttft_ms: float
    computed: int
    own_cache: int
    pegaflow: int


@dataclass
class Run:
    """One engine process from start to end."""

    phase: str
    start_s: float = 0.0
    asked: int = 0
    """Tokens that the engine's own cache did not have, so that PegaFlow was asked for them."""
    answers: list[Answer] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Sum of one count over all prompts."""
        return sum(getattr(answer, name) for answer in self.answers)

    def ttft_ms(self) -> float:
        """Median time to first token."""
        return statistics.median(answer.ttft_ms for answer in self.answers)

    def outputs(self) -> list[list[int]]:
        """The tokens that count."""
        return [answer.output for answer in self.answers]

    def write(self, path: Path) -> None:
        """Appears whole or not at all: the reader may poll for it."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> Run:
        """The inverse of :meth:`write`."""
        values = json.loads(path.read_text())
        values["answers"] = [Answer(**answer) for answer in values["answers"]]
        return cls(**values)
