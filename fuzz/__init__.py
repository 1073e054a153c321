"""Garbage in: the daemon and the clients must refuse it, live on, and not grow.  See __main__.py."""
