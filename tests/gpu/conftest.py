"""Puts the repository root on the path, so that the workloads of bench/ can be used."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
