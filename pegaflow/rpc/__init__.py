"""Cap'n Proto under Trio and under blocking code.  The only package that imports capnp."""
