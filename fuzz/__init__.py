"""Garbage in: daemon and clients must refuse it, live on, and not grow.  See __main__.py."""
