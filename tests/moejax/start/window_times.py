"""What a model of 24 layers takes from its start to its first tokens: with gpt-oss's windows in
turn, and without windows.

    python -m tests.moejax.start.window_times [--repeats 3]

prints the processor's seconds of each, which other programs change little, the seconds, and the
ratio of the former. Every start is a process of its own, without a cache of compiled programs.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.moejax.models.families import write_checkpoint

LAYERS = 24
KINDS = {
    "no windows": ["full_attention"] * LAYERS,
    "in turn": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
START = """
import sys
from moejax import LLM, SamplingParams
with LLM(sys.argv[1], expert_budget="50%", max_model_len=256, progress=False) as llm:
    llm.generate([list(range(3, 90))], SamplingParams(max_tokens=8, ignore_eos=True))
"""


def seconds_of(checkpoint: Path) -> tuple[float, float]:
    """(processor's seconds, seconds) of a start."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as cache:
        began, used = time.perf_counter(), processor_seconds()
        command = [sys.executable, "-c", START, str(checkpoint)]
        subprocess.run(command, check=True, env=environment | {"XDG_CACHE_HOME": cache})
        return processor_seconds() - used, time.perf_counter() - began


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind (default: 3)")
    repeats = parser.parse_args().repeats
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for kind, types in KINDS.items():
            fields = {"num_hidden_layers": LAYERS, "layer_types": types, "sliding_window": 32}
            write_checkpoint(Path(folder, kind), "GptOssForCausalLM", **fields)
        for _ in range(repeats):  # in turn, since the machine's load changes
            for kind in KINDS:
                found[kind].append(seconds_of(Path(folder, kind)))
    medians = {kind: np.median(times, axis=0) for kind, times in found.items()}
    for kind, (used, passed) in medians.items():
        print(f"{kind:12} {used:.1f} s of the processor, {passed:.1f} s")
    print(f"ratio        {medians['in turn'][0] / medians['no windows'][0]:.2f}")


if __name__ == "__main__":
    main()
