"""Where things are: the repository, and the embedded model."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "moejax" / "demo"
