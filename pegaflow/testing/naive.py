"""Models that are too simple to be wrong; the policy machines compare with them.

Everything is found by looking through everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

Key = tuple[int, bytes]
"""(shelf, hash)"""


@attrs.define
class NaiveBlock:
    """One sealed block."""

    key: Key
    parent_hash: bytes
    parent: Key | None = None
    used: int = 0
    pins: int = 0
    waiting: bool = False
    """Its parent was not here when it came; it is adopted if the parent comes later."""


@attrs.define
class NaiveForest:
    """Sealed blocks, their order of use and their prefixes."""

    blocks: dict[Key, NaiveBlock] = attrs.field(factory=dict)
    tick: int = 0

    def touch(self, keys: Sequence[Key]) -> None:
        """Head first; the head counts as used last."""
        for i, key in enumerate(keys):
            self.blocks[key].used = self.tick + len(keys) - i
        self.tick += len(keys)

    def welcome(self, fresh: Sequence[tuple[Key, bytes]]) -> None:
        """Blocks sealed by one save in its order: (key, hash before it)."""
        before = set(self.blocks)
        for i, (key, parent_hash) in enumerate(fresh):
            self.blocks[key] = NaiveBlock(key, parent_hash, used=self.tick + len(fresh) - i)
        self.tick += len(fresh)
        order = [key for key, _ in fresh]
        for i, key in enumerate(order):
            block = self.blocks[key]
            parent = (key[0], block.parent_hash)
            if parent in before or parent in order[:i]:
                block.parent = parent
            elif block.parent_hash:
                block.waiting = True
        for key in order:
            waiting = [
                block
                for block in self.blocks.values()
                if block.waiting and (block.key[0], block.parent_hash) == key
            ]
            above = set(self._ancestors(key))
            for block in waiting:
                block.waiting = False
                if block.key not in above:
                    block.parent = key

    def _ancestors(self, key: Key | None) -> Iterable[Key]:
        while key is not None:
            yield key
            key = self.blocks[key].parent

    def evictable(self) -> list[Key]:
        """The oldest first."""
        parents = {block.parent for block in self.blocks.values()}
        found = [b for b in self.blocks.values() if b.key not in parents and not b.pins]
        return [block.key for block in sorted(found, key=lambda block: block.used)]

    def clearable(self) -> set[Key]:
        """All that no pinned block hangs under."""
        pinned = [block.key for block in self.blocks.values() if block.pins]
        stays = {key for start in pinned for key in self._ancestors(start)}
        return set(self.blocks) - stays

    def evict(self) -> Key | None:
        """Remove and return the next victim."""
        for key in self.evictable():
            del self.blocks[key]
            return key
        return None
