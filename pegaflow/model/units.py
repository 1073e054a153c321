"""Sizes and times as people write them."""

from __future__ import annotations

import re

from pegaflow.errors import ConfigError

_UNIT_BYTES = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size_bytes(text: str) -> int:
    """ "30gb", "1.5 GB", "4096" -> bytes; binary multiples, as upstream's flags have them.

    Raises :exc:`ConfigError` for anything else.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit or "b") not in _UNIT_BYTES:
        raise ConfigError(f"{text!r} is no size: write a number and b, kb, mb, gb or tb (30gb)")
    return int(float(match[1]) * _UNIT_BYTES[unit or "b"])


def format_size(size_bytes: int) -> str:
    """For people: the largest unit that leaves at least 1."""
    for unit in ("tb", "gb", "mb", "kb"):
        if size_bytes >= _UNIT_BYTES[unit]:
            return f"{size_bytes / _UNIT_BYTES[unit]:.4g}{unit}"
    return f"{size_bytes}b"
