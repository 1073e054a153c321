"""The halves that vLLM loads.  ``adapter`` is the only module that knows its versions."""
