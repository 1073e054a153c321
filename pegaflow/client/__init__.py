"""What an engine's connector, or a benchmark's mock engine, uses to reach the daemon.

:class:`pegaflow.client.blocking.BlockingSession` for synchronous code,
:func:`pegaflow.client.session.open_session` under Trio; the same methods, the same errors.
"""
