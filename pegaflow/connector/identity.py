"""Key identity: what a block's bytes depend on although its hash does not say it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from pegaflow.model.keys import Manifest, Namespace

FORMAT = "1"
"""Meaning of the connector's own part of a key; raise it when a slot's content changes."""

SAMPLE_TOKENS = tuple(range(16))
_SAMPLES_A_FILE = 16
_SAMPLE_BYTES = 1 << 16
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")


@attrs.frozen
class Identity:
    """A namespace and the manifest that every engine in it shares."""

    namespace: Namespace
    manifest: Manifest


def make_identity(fields: Mapping[str, str], namespace: str = "") -> Identity:
    """The manifest and its namespace: as given, or named by 160 bits of its digest."""
    manifest = Manifest(dict(fields))
    manifest.check_complete()
    if not namespace:
        text = json.dumps(dict(sorted(manifest.fields.items())), ensure_ascii=False)
        digest = hashlib.sha256(text.encode()).hexdigest()[:40]
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(manifest.fields["model"]).name)[:40]
        namespace = f"{model or 'model'}-{digest}"
    return Identity(Namespace(namespace), manifest)


def seed_check(hash_function: Callable[[object], bytes], seed: str | None, engine_id: str) -> str:
    """A sample block's hash, computed as the engine does it; equal only for equal hash inputs.

    Without a fixed ``seed`` the engine draws one at every start and no key of it can ever be
    found again: the check then names this one engine.
    """
    if seed is None:
        return f"random:{engine_id}"
    none_hash = hash_function(seed)
    return hash_function((none_hash, SAMPLE_TOKENS, None)).hex()


def weights_revision(model: str, revision: str | None, commit: str | None) -> str:
    """What tells two sets of weights under one name apart.

    A hub model: the revision or the commit that was resolved.  A folder: a digest of every weight
    file's name, size and samples of its content, so that weights replaced in place are noticed;
    about 1 MiB is read from each file.
    """
    if revision or commit:
        return f"{revision or ''}@{commit or ''}"
    folder = Path(model)
    if not folder.is_dir():
        return "unknown"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHT_FILES and path.is_file():
            _sample_file(path, digest.update)
    return f"sampled:{digest.hexdigest()[:40]}"


def _sample_file(path: Path, update: Callable[[bytes], object]) -> None:
    """Feed name, size and evenly spread samples of a file, first and last bytes included."""
    size = path.stat().st_size
    update(f"{path.name} {size}\n".encode())
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for i in range(_SAMPLES_A_FILE):
            file.seek(last * i // (_SAMPLES_A_FILE - 1))
            update(file.read(_SAMPLE_BYTES))


def digest_of(value: object) -> str:
    """40 hex digits of any JSON-like value; what JSON can't say is written with ``str``."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]
