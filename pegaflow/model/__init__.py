"""Values that every part speaks.  Imports nothing of ours but errors."""
