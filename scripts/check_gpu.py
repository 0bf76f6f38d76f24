"""Everything that only a real GPU can show about correctness. Run it first, and after any change
of kernels, jax or driver; commit the table it writes.

python scripts/check_gpu.py --help says what it does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Two processes share the GPU while the tests run: neither may take most of it beforehand.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np

from host_offload.budget import Share
from moejax.cache import use_compilation_cache
from moejax.device import select_device
from moejax.engine import Engine
from moejax.errors import UserError
from moejax.kernel_shapes import kernel_shapes
from moejax.models.config import ModelConfig
from moejax.random_model import SHAPES, random_model, shape
from moejax.sampling_params import SamplingParams
from moejax.startup import Limits, start_engine
from pallas_kernels import parse_ops, resolve_ops
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import Formats, VersionFormats
from pallas_kernels.triton import is_interpreted
from pallas_kernels.verification import Unverified, checks, load_table, write_table
from pallas_kernels.verification.table import SHIPPED, entry, file_name, measured

REPOSITORY = Path(__file__).resolve().parent.parent

PARTS = ("kernels", "bits", "engine")

DESCRIPTION = """\
Three checks, each of which fails the run:

kernels  every kernel configuration that dispatch may choose for the shapes named, compared with the
         XLA reference on this device; right ones are written to the table that dispatch reads
         (pallas_kernels/verification/tables), wrong ones are listed and left out
bits     contract 1 on this device: tests/moejax/test_same_bits.py
engine   a model of the size of Qwen3-30B-A3B with random weights: 200 decode steps at four expert
         budgets, which must give equal bits
"""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    wanted = [part for part in PARTS if getattr(args, part)] or PARTS
    use_compilation_cache(None)
    device = select_device()
    if device.platform != "gpu" and not is_interpreted():
        print("check_gpu: there is no GPU here; nothing was checked", file=sys.stderr)
        return 2
    print(f"{device.device_kind}, jax {jax.__version__}, {device.client.platform_version}")
    failures = 0
    if "kernels" in wanted:
        failures += check_kernels(device, args.shapes, args.dtypes, args.tables)
    if "bits" in wanted:
        failures += check_bits()
    if "engine" in wanted:
        failures += check_engine(device, args.engine_shape, args.layers, args.steps)
    print("all checks passed" if not failures else f"{failures} checks FAILED")
    return 1 if failures else 0


VERSIONS = (
    None,
    *((version,) for version in ("int8", "int4", "int2", "lossless12")),
    *(("dense", lo) for lo in ("int8", "int4", "int2")),
    *(("int8", "int4"), ("int4", "int2"), ("lossless12", "int4")),
    (("dense", "lossless12"),),
    (("dense", "lossless12"), ("dense", "dense")),
    (("dense", "lossless12"), "int4"),
)
"""What runs have: one version, pairs of tiers, lossless12 in transit (with layers that it cannot
hold). A pair: in a cell, in the store; None: dense alone."""


def formats_of(versions: tuple | None, config: ModelConfig, dtype: str) -> Formats | None:
    """The formats of a run with these versions."""
    if versions is None:
        return None
    size = config.hidden_size, config.moe_intermediate_size, dtype
    pairs = ((version,) * 2 if isinstance(version, str) else version for version in versions)
    return tuple(
        VersionFormats(RecordFormat(cell, *size), RecordFormat(held, *size)) for cell, held in pairs
    )


def check_kernels(device: jax.Device, shapes: list[str], dtypes: list[str], tables: Path) -> int:
    """Runs every check of the shapes; returns how many failed. Writes the table."""
    path = tables / file_name(device)
    # Other shapes' entries stay; of another source or driver they do not count.
    entries = load_table(path)
    seen: set[str] = set()
    failed = 0
    for name in shapes:
        config = shape(name)
        for dtype in dtypes:
            layout = config.slot_layout(itemsize=2)
            ops = resolve_ops("auto", platform="gpu", dtype=dtype)
            kernels = [
                kernel
                for versions in VERSIONS
                if dtype == "bfloat16" or "lossless12" not in str(versions)
                for kernel in kernel_shapes(
                    config, dtype, layout, formats_of(versions, config, dtype)
                )
            ]
            for check in (c for kernel in kernels for c in checks(kernel, ops, device)):
                if check.key in seen:
                    continue
                seen.add(check.key)
                began = time.perf_counter()
                try:
                    error = measured(check, device)
                except Unverified as problem:
                    failed += 1
                    entries.pop(check.key, None)
                    print(f"WRONG {check.key}: {problem}", flush=True)
                    continue
                entries[check.key] = entry(check, error, device)
                seconds = time.perf_counter() - began
                print(f"ok    {check.key}: {error:.1e}, {seconds:.1f} s", flush=True)
    write_table(path, device, entries)
    print(f"{len(entries)} checked configurations in {path}")
    return failed


def check_bits() -> int:
    """Contract 1's tests on this device; 1 if they fail."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["JAX_PLATFORMS"] = "cuda,cpu"
    command = [sys.executable, "-m", "pytest", "-q", "tests/moejax/test_same_bits.py"]
    return int(subprocess.run(command, cwd=REPOSITORY, env=environment).returncode != 0)


def check_engine(device: jax.Device, name: str, layers: int | None, steps: int) -> int:
    """Decodes at four budgets; returns how many differ from full residency."""
    config = shape(name, layers)
    began = time.perf_counter()
    loaded = random_model(config, device=device)
    limits = Limits(max_model_len=1024, max_num_seqs=64, expert_budget=Share(1.0))
    try:
        engine, budget = start_engine(
            loaded,
            limits,
            eviction="lru",
            ops=parse_ops("auto"),
            device=device,
            seed=0,
            listener=None,
        )
    except UserError as error:
        print(f"the engine does not start: {error}")
        loaded.store.delete()
        return 1
    print(
        f"{name}, {config.num_hidden_layers} layers: {time.perf_counter() - began:.0f} s to start"
    )
    print("; ".join(budget.notes), engine.runner.ops)
    experts = config.num_experts
    digests, failed = {}, 0
    for cells in (experts, experts // 2, experts // 8, 0):
        began = time.perf_counter()
        engine.set_budget([cells] * config.num_hidden_layers, budget.kv_slots)
        digests[cells] = _digest(engine, steps)
        same = digests[cells] == digests[experts]
        failed += not same
        faults = engine.runner.faults()
        failed += bool(faults)
        print(
            f"{cells} cells a layer: {steps} steps in {time.perf_counter() - began:.1f} s, "
            f"bits {'equal' if same else 'DIFFERENT'}, integrity {faults or 'ok'}",
            flush=True,
        )
    # The same requests among 50 others: decode runs in its larger buckets of rows.
    engine.set_budget([experts] * config.num_hidden_layers, budget.kv_slots)
    same = _digest(engine, steps, company=50) == digests[experts]
    print(f"among 50 other requests: bits {'equal' if same else 'DIFFERENT'}")
    failed += not same
    engine.runner.delete()
    return failed


def _digest(engine: Engine, steps: int, company: int = 0) -> str:
    """sha256 over the logits of every sampled token of a fixed mix of requests. company: so many
    other requests run beside them, and do not count."""
    totals: dict[int, Any] = {}

    def record(step) -> None:
        rows = np.asarray(step.output.logits)
        for row, request in step.sampled():
            if id(request) in totals and request.finish_reason is None:
                totals[id(request)].update(rows[row].tobytes())

    rng = np.random.default_rng(0)
    vocabulary = engine.runner.config.vocab_size
    engine.listener = record
    for length in (1, 17, 64, 65, 200, 300):
        prompt = rng.integers(0, vocabulary, length).tolist()
        params = SamplingParams(temperature=0.8, seed=length, max_tokens=steps, ignore_eos=True)
        totals[id(engine.add(prompt, params))] = hashlib.sha256()
    for _ in range(company):
        prompt = rng.integers(0, vocabulary, 20).tolist()
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    while not engine.idle:
        engine.step()
    engine.listener = None
    return " ".join(total.hexdigest() for total in totals.values())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help=f"only {part} (may be combined)")
    parser.add_argument(
        "--shapes",
        type=lambda text: text.split(","),
        default=list(SHAPES),
        help=f"comma-separated model shapes for `kernels` (default: {','.join(SHAPES)})",
    )
    parser.add_argument(
        "--dtypes",
        type=lambda text: text.split(","),
        default=["bfloat16", "float16"],
        help="comma-separated dtypes for `kernels` (default: bfloat16,float16)",
    )
    parser.add_argument(
        "--tables", type=Path, default=SHIPPED, help="where the table goes (default: the package)"
    )
    parser.add_argument("--engine-shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer layers for `engine`")
    parser.add_argument("--steps", type=int, default=200, help="decode steps (default: 200)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
