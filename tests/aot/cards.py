"""Steps of known models, and the kernels that their starts check, compiled for a card.

    JAX_PLATFORMS=cpu python -m tests.aot.cards Qwen3-30B-A3B rtx4090 [--only PART_OF_A_NAME]

prints shared memory, registers and spills of every kernel of the model's steps and, with --only, of
the checks of that name instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moejax.models.config import ModelConfig, parse_config
from moejax.start.decide.shapes import (
    KERNEL_WAVES,
    decodes_in_buckets,
    prefills_in_buckets,
    without_kernel,
)
from moejax.start.kernels import kernel_shape
from moejax.step.compiler import compiler_options
from moejax.step.programs import ProgramKey, Programs
from pallas_kernels import Ops, resolve_ops
from pallas_kernels.cards import shared_class
from pallas_kernels.verification import Check, checks
from pallas_kernels.verification.check import argument_shapes
from tests.aot.aot_h200 import CARDS, Compiled, device_of
from tests.aot.ptxas import Kernel, compile_kernels
from tests.moejax.models.test_published_configs import FILES
from tests.moejax.models.test_states import KIMI
from tests.moejax.step.test_constant_memory import PREFILL, STAGED, GiB, abstract_programs

ALTERNATING = "alternating windows"
"""Qwen3-30B-A3B if its layers had gpt-oss's windows in turn."""

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "OLMoE-1B-7B", "DeepSeek-V2-Lite", ALTERNATING)

HYBRIDS = {
    "Qwen3-Next-80B-A3B": FILES["Qwen3-Next-80B-A3B"] | {"num_hidden_layers": 8},
    "Qwen3.5-35B-A3B": FILES["Qwen3.5-35B-A3B (text alone)"]
    | {"num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    "Nemotron-3-Nano-30B-A3B": FILES["Nemotron-3-Nano-30B-A3B"],
    "Kimi-Linear-48B-A3B": KIMI,
}
"""Models whose layers have states, of the first two as many as two turns of the pattern have."""

STEPS = (ProgramKey("decode", 16), STAGED, PREFILL)
"""Decode of 16 rows, decode of 64 with a stage list, prefill of 8192 tokens."""

ARENA_GiB = {"a100": 40, "rtx4090": 14, "h200": 40, "rtx5060ti": 6}
"""Above 4 GiB, where kernels address with 64 bits."""

OURS = re.compile(
    r"linear|norm_linear|head_linear|rms_norm|layer_norm|kv_write|latent_write|decode_|prefill_"
    r"|route|plan|fill|stage|move|expert_|combine|norm_route|tile_squares|truncate"
    r"|gated_delta|selective_scan|short_conv"
)
"""How the names of our kernels begin; all others are XLA's."""


def config_of(model: str) -> ModelConfig:
    if model != ALTERNATING:
        return parse_config(HYBRIDS.get(model) or FILES[model])
    config = parse_config(FILES[MODELS[0]])
    turns = (True, False) * (config.num_hidden_layers // 2)
    return dataclasses.replace(config, sliding_window=128, window_layers=turns)


def kernels_on(card: str, model: str, **changes: str) -> Ops:
    """The ops that run for a model on a card: kernels, with the stages of its class, but for
    changes."""
    config = config_of(model)
    ops = resolve_ops(
        "auto",
        platform="gpu",
        dtype="bfloat16",
        no_kernel=without_kernel(config),
        shared_kib=shared_class(device_of(card)),
    )
    return dataclasses.replace(ops, **changes)


def step_programs(card: str, model: str, **changes: str) -> Programs:
    config, ops = config_of(model), kernels_on(card, model, **changes)
    return abstract_programs(
        config,
        ARENA_GiB[card] * GiB,
        ops=ops,
        waves=KERNEL_WAVES,
        bucketed=decodes_in_buckets(config, ops),
        prefill_bucketed=prefills_in_buckets(config, ops),
        rows=64,
        max_model_len=4096,
        max_num_batched_tokens=8192,
    )


def compile_step(
    card: str, programs: Programs, key: ProgramKey
) -> tuple[Compiled, dict[str, Kernel]]:
    """A step of step_programs, as the engine compiles it."""
    program = programs.program(key)
    return compile_kernels(
        program.function,
        *program.args,
        card=card,
        donate_argnums=program.donated,
        host_argnums=tuple(i for i, arg in enumerate(program.args) if arg is programs.stores),
        compiler_options=compiler_options("gpu", key),
    )


def start_checks(
    card: str, model: str, versions: Sequence[tuple[str, str]] = (), **changes: Any
) -> Iterator[Check]:
    """What a start of the model on the card may check. versions: of its experts, (in a cell, in the
    store), if not dense. changes: fields of the ops that run."""
    config, ops = config_of(model), kernels_on(card, model, **changes)
    shape = kernel_shape(config, "bfloat16", config.slot_layout(itemsize=2))
    of_versions = {"versions": tuple(versions)} if versions else {}
    return iter(checks(dataclasses.replace(shape, **of_versions), ops))


def named(found: Iterator[Check], pattern: str) -> Check:
    """The one that is below 4 GiB and whose name, but for the class, is matched."""
    (check,) = (
        check
        for check in found
        if not check.wide and re.fullmatch(pattern, re.sub(r" \d+ KiB| \w+$", "", check.key))
    )
    return check


def check_call(check: Check) -> Mapping[str, Any]:
    """The kernel of a check: function, args and options of compile_kernels."""
    arena, stores = int(check.arena is not None), int(check.stores is not None)
    return {
        "fn": functools.partial(check.run, check.implementation),
        "args": argument_shapes(check),
        "donate_argnums": tuple(range(arena)),
        "host_argnums": tuple(range(arena, arena + stores)),
    }


def compile_check(check: Check, card: str) -> tuple[Compiled, dict[str, Kernel]]:
    options = dict(check_call(check))
    return compile_kernels(options.pop("fn"), *options.pop("args"), card=card, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*MODELS, *HYBRIDS])
    parser.add_argument("card", choices=CARDS)
    parser.add_argument("--only", help="part of the names of checks, in place of steps")
    args = parser.parse_args()
    if args.only:
        every = [c for c in start_checks(args.card, args.model) if args.only in c.key]
        found = ((check.key, compile_check(check, args.card)[1]) for check in every)
    else:
        programs = step_programs(args.card, args.model)
        found = ((str(key), compile_step(args.card, programs, key)[1]) for key in STEPS)
    for name, kernels in found:
        print(f"\n{name}\n{'kernel':32} {'shared':>8} {'registers':>9} {'spilled':>7}")
        for each, kernel in sorted(kernels.items()):
            print(f"{each:32} {kernel.shared_bytes:8} {kernel.registers:9} {kernel.spill_bytes:7}")


if __name__ == "__main__":
    main()
