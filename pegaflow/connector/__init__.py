"""The vLLM connector: ``kv_connector_module_path="pegaflow.connector"``, class ``PegaKVConnector``.

``common`` is all that the scheduler half and the worker half share; ``layout`` and ``identity``
are pure; ``vllm/adapter`` knows vLLM's versions; ``vllm/scheduler`` decides and touches no tensor;
``vllm/worker`` and ``vllm/lanes`` move bytes and decide nothing.  Importing this package is cheap
and needs neither vLLM nor CUDA: the API server's process imports it too.
"""

from __future__ import annotations

__all__ = ["PegaKVConnector", "register"]


def __getattr__(name: str) -> object:
    if name == "PegaKVConnector":
        from pegaflow.connector.vllm.connector import PegaKVConnector

        return PegaKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Entry point ``vllm.general_plugins``: makes the class known by its name."""
    from pegaflow.connector.vllm import adapter

    adapter.register_connector("PegaKVConnector", "pegaflow.connector")
