"""Tests import their own modules as ``tests.*``; the installed package comes first."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
