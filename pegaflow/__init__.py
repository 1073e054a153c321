"""PegaFlow: one daemon a host owns the KV cache; inference engines come and go.

``model`` holds the values that everyone speaks, ``policy`` decides (pure and synchronous),
``engine`` drives one device each, ``rpc`` is the only place that knows Cap'n Proto, ``client`` is
what engines use, ``node`` is the daemon (open ``node/daemon.py``, then ``node/flows.py``),
``connector`` plugs into vLLM, ``observe`` counts, ``testing`` simulates.
"""

__version__ = "0.1.0"
