"""Where models and texts are: the embedded model, and the reference files beside the repository."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "moejax" / "demo"
SHARED = Path(os.environ.get("MOEJAX_SHARED", REPOSITORY.parent / "shared"))
TRI = SHARED / "models" / "tri"
TEXTS = [str(SHARED / "corpora" / f"{name}.txt") for name in ("text", "math", "code")]
