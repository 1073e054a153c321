"""Makes ``tests.connector.fakes`` importable; last, so as not to shadow an installed package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
