"""The compiled schema, loaded once."""

from __future__ import annotations

from pathlib import Path

import capnp

_PACKAGE = Path(__file__).resolve().parent.parent


def _folder() -> Path:
    """``schema`` lies inside an installed package, and beside the package in a checkout."""
    for folder in (_PACKAGE / "schema", _PACKAGE.parent / "schema"):
        if (folder / "node.capnp").is_file():
            return folder
    raise FileNotFoundError(f"no node.capnp in {_PACKAGE}/schema or {_PACKAGE.parent}/schema")


capnp.remove_import_hook()
# Without capnp's own folder on the import path a load can abort the process.
_IMPORTS = [str(Path(capnp.__file__).resolve().parent.parent)]

common = capnp.load(str(_folder() / "common.capnp"), imports=_IMPORTS)
node = capnp.load(str(_folder() / "node.capnp"), imports=_IMPORTS)
