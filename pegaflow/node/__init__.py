"""The daemon of one host.  Open daemon.py first, then flows.py."""
