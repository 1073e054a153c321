"""Devices: one contract (base.py), host memory, CUDA, and the pool they copy to and from."""
