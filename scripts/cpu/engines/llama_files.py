"""Files of llama.cpp, written by an interpreter that has its packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scripts.cpu.engines.protocol import REPOSITORY

NEEDED = "pip install llama-cpp-python==0.3.36 gguf==0.19.0"


def why_not_llama(python: str) -> str | None:
    """What this interpreter lacks, and the command that mends it; None: nothing."""
    script = "import llama_cpp, gguf"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True)
    if not found.returncode:
        return None
    return f"{python}: {found.stderr.strip().rpartition(chr(10))[2]}; run `{NEEDED}`"


def write_gguf(python: str, source: Path, path: Path, *options: str) -> None:
    """The GGUF file of a checkpoint, or of another one, by an interpreter that has gguf, unless it
    is there. options: as of gguf_file. Raises RuntimeError."""
    if path.exists():
        return
    part = path.with_suffix(".part")
    command = [python, "-m", "scripts.cpu.engines.gguf_file", str(source), str(part), *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{path.name} cannot be written: {ran.stderr.strip()[-2000:]}")
    part.rename(path)
