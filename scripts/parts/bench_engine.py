"""The engine that a bench measures: sizes checked first, random weights, cells by table only."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from host_offload.memory.budget import Share, format_bytes
from host_offload.memory.device_memory import free_memory, host_available_bytes
from host_offload.policies.eviction.eviction_names import EVICTION
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.random_model import (
    SHAPES,
    expert_layout,
    random_model,
    shape,
)
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.start.build import start_engine
from moejax.start.options import Config
from moejax.start.report.model_info import model_info
from moejax.step.executor import Executor
from pallas_kernels.dispatch import parse_ops
from scripts.parts.places import DEMO

PREFILL = 2048
"""Prompt tokens of the largest prefill step, before decode steps that are timed."""

HOST_RESERVE = 1 << 30
"""Host memory left to everything that is not counted."""

SMALL: dict[str, Any] = {
    "max_model_len": 192,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 128,
    "expert_budget": "100%",
    "kv_budget": "3MiB",
    "eviction": "lru",
    "progress": False,
}
"""Small shapes, so that a step takes milliseconds; budgets move within this arena, so experts have
cells."""


# ---- options


def add_options(parser: argparse.ArgumentParser, cells: str) -> None:
    """The options that all benches have. cells: the default of --cells."""
    add = parser.add_argument
    add("--shape", default="demo", help=f"{', '.join(SHAPES)} (default: %(default)s)")
    add("--layers", type=int, help="layers, when the whole model does not fit (default: all)")
    add(
        "--cells",
        default=cells,
        help="cells per layer: numbers, shares of a layer's experts, or all (default: %(default)s)",
    )
    add("--dtype", default="auto", help="auto (bfloat16), bfloat16, float16 or float32")
    add("--eviction", default="lru", help="lru or lfu (default: %(default)s)")
    add(
        "--ops",
        default="auto",
        help="implementation of the ops: auto, xla, pallas, or by op as in "
        "fill=pallas,plan=xla (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of everything random (default: 0)")
    add("--json", action="store_true", help="one JSON object per row on stdout, no table")


def check_names(args: argparse.Namespace) -> None:
    """Raises UserError for an eviction policy or an op that does not exist."""
    if args.eviction not in EVICTION:
        known = ", ".join(EVICTION)
        raise UserError(f"unknown eviction policy {args.eviction!r}; known: {known}")
    try:
        parse_ops(args.ops)
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_numbers(text: str, option: str, least: int) -> list[int]:
    """Whole numbers with commas. Raises UserError for anything else and below `least`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} takes whole numbers with commas, not {text!r}") from None
    if min(numbers) < least:
        raise UserError(f"{option} must be at least {least}, got {min(numbers)}")
    return numbers


def parse_cells(text: str, experts: int) -> list[int]:
    """Cells per layer from "0,25%,all", without repetitions. experts: of a layer.

    Raises UserError for anything else and for more cells than experts.
    """
    cells = []
    for part in text.split(","):
        word = "100%" if part.strip() == "all" else part.strip()
        (number,) = parse_numbers(word.removesuffix("%"), "--cells", least=0)
        cells.append(round(number / 100 * experts) if word.endswith("%") else number)
        if cells[-1] > experts:
            raise UserError(f"--cells {part} is more than a layer's {experts} experts")
    return list(dict.fromkeys(cells))


# ---- memory


def check_fits(
    args: argparse.Namespace,
    config: ModelConfig,
    device: jax.Device,
    cells: int,
    *,
    tokens: int,
    prefill: int,
) -> None:
    """check_memory for this machine. Call it before anything is allocated."""
    check_memory(
        config,
        args.shape,
        args.dtype,
        cells,
        host_available_bytes(),
        None if device.platform == "cpu" else free_memory(device).available,
        tokens=tokens,
        prefill=prefill,
    )


def check_memory(
    config: ModelConfig,
    name: str,
    dtype: str,
    cells: int,
    host: int,
    device: int | None = None,
    *,
    tokens: int = 0,
    prefill: int = 0,
) -> None:
    """Raises UserError if the model does not fit, saying how many layers would.

    host, device: bytes available there; device None: its memory is the host's. cells: per layer,
    of the largest arena. tokens: whose KV is kept. prefill step: prompt tokens computed at once.
    """

    def need(layers: int) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes in host memory and on the device, by what they are for."""
        info = model_info(shape(name, layers), dtype)
        itemsize = expert_layout(config, dtype).itemsize
        kv = 2 * layers * config.num_key_value_heads * config.head_dim * itemsize * tokens
        # The experts' results, float32[T, K, D]: by far the largest activation.
        results = prefill * config.num_experts_per_tok * config.hidden_size * 4
        experts, rest = info.versions["dense"]["store_bytes"], info.device_bytes
        at_host = {"experts": experts, "other weights": rest}
        on_device = {
            f"an arena of {cells} cells a layer": experts * cells // config.num_experts,
            "KV and activations": kv + results,
        }
        if device is None:
            return at_host | on_device, {}
        return at_host, {"weights other than experts": rest} | on_device

    for place, where in enumerate(("host", "device")):
        parts = need(config.num_hidden_layers)[place]
        room = host - HOST_RESERVE if place == 0 else device or 0
        if sum(parts.values()) <= room:
            continue
        one, two = (sum(need(layers)[place].values()) for layers in (1, 2))
        fitting = (room - one) // (two - one) + 1 if two > one else 0
        advice = f"use --layers {fitting}" if fitting > 0 else "not even one layer fits"
        listed = ", ".join(f"{format_bytes(n)} for {what}" for what, n in parts.items())
        raise UserError(
            f"{name} with {config.num_hidden_layers} layers needs of {where} memory {listed}; "
            f"{format_bytes(max(room, 0))} can be used: {advice}"
        )


# ---- engine


@contextmanager
def weights_of(
    args: argparse.Namespace, config: ModelConfig, device: jax.Device
) -> Iterator[LoadedModel]:
    """The shape's model with random weights, and the embedded one as it is, unless other layers are
    asked for; leaving the context frees them."""
    use_compilation_cache()
    if args.shape == "demo" and args.layers is None:
        loaded = load_checkpoint(DEMO, args.dtype, device)
    else:
        loaded = random_model(config, args.dtype, device, args.seed)
    try:
        yield loaded
    finally:
        for array in jax.tree.leaves(loaded.params):
            array.delete()
        loaded.store.delete()


@contextmanager
def compiled_engine(
    args: argparse.Namespace,
    loaded: LoadedModel,
    device: jax.Device,
    limits: Config,
    *,
    everything: bool = True,
) -> Iterator[Engine]:
    """An engine that needs no more compilation (everything False: that compiles what is called);
    leaving the context frees its arena, not the weights, so that the next engine, of other shapes,
    can have them."""
    given = {"eviction": args.eviction, "ops": args.ops, "seed": args.seed}
    engine, _ = start_engine(loaded, limits.replace_options(**given), device)
    runner = engine.runner
    try:
        if not everything:
            runner.compiler.drop()
        runner.wait_compiled(everything=True)  # also those that compile now, which disturb times
        yield engine
    finally:
        runner.delete(given=False)


@contextmanager
def decode_engine(
    args: argparse.Namespace,
    config: ModelConfig,
    device: jax.Device,
    cells: Sequence[int],
    *,
    rows: int,
    longest: int,
) -> Iterator[Engine]:
    """An engine for decode steps of `rows` sequences of up to `longest` tokens, with any of
    these numbers of cells a layer. Raises UserError where that does not fit."""
    limits = Config.of(
        args.shape,
        enable_prefix_caching=False,
        max_num_seqs=rows,
        max_model_len=longest,
        max_num_batched_tokens=PREFILL,
        expert_budget=largest(cells, config),
    )
    check_fits(args, config, device, max(cells), tokens=rows * longest, prefill=PREFILL)
    with (
        weights_of(args, config, device) as loaded,
        compiled_engine(args, loaded, device, limits, everything=False) as engine,
    ):
        yield engine


def largest(cells: Sequence[int], config: ModelConfig) -> Share:
    """The expert budget that has room for any of these numbers of cells a layer."""
    return Share(max(cells) / config.num_experts)


def grant(engine: Engine, cells: int) -> None:
    """Gives every layer so many cells."""
    arena = engine.scheduler.arena
    engine.runner.grant_cells(arena.grant_cells([cells] * arena.cell_row.shape[0]))


@contextmanager
def no_compilation(runner: Executor) -> Iterator[None]:
    """Raises RuntimeError if anything was compiled in the block."""
    log = compilations()
    before, names = len(log), runner.executables()
    yield
    if len(log) > before or runner.executables() != names:
        raise RuntimeError(
            f"{len(log) - before} compilations while measuring; executables "
            f"{names} became {runner.executables()}"
        )


@functools.cache
def compilations() -> list[str]:
    """Grows by one entry with every compilation by jax in this process."""
    log: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            log.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return log


def log_to(path: Path | None, line: Mapping[str, Any]) -> None:
    """Adds an object of JSON to the file at once: a run that is ended keeps what it measured."""
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def described(runner: Executor) -> dict[str, Any]:
    """Fields of a bench's line that say what ran."""
    return {
        "layers": runner.config.num_hidden_layers,
        "experts": runner.config.num_experts,
        "dtype": str(jax.tree.leaves(runner.params)[0].dtype),
        "device": runner.device.device_kind,
        "jax": jax.__version__,
        "ops": runner.ops.chosen(),
    }
