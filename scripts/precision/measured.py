"""Measured runs for the command `speed`: engines of one memory, one per arm, that take turns."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from host_offload.memory.budget import Share, format_bytes
from host_offload.memory.placement import slots_for
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.tensors import expected_tensors
from moejax.costs.rates import Rates, measure_rates
from moejax.evaluate.experiments.intervals import median_interval
from moejax.models.config import parse_config
from moejax.models.model_config import ModelConfig
from moejax.sizes import parse_size

MODEL = {
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "dtype": "bfloat16",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
"""The random model that is measured by default: small enough for prompts of 4096 tokens on a CPU,
with experts of 384 KiB."""

MIX = ("dense", "int4")
SPARES = 2
SETTLING, SETTLING_TOKENS = 12, 32
"""Most runs until DynaExq's residency is taken for the fixed map; tokens that each generates."""

LONGER = 4
"""Times as many tokens as --max-tokens in the runs that compare DynaExq on and off."""

BASELINE = "int4, static"
"""What the others' ratios are to."""


@dataclasses.dataclass(frozen=True)
class Arm:
    name: str
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one engine over a batch."""

    ttft_s: list[float]
    tpot_s: list[float]
    """All sequences, one after the other."""
    misses: int
    link_bytes: int
    active: float
    """Experts that a decode step computes, all layers together."""
    compiled: bool
    """It was the first to run some executable, so its times say little."""
    precision: dict[str, Any]


def checkpoint(directory: Path, raw: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint of random weights, written if absent."""
    config = parse_config(raw, "random")
    path = directory / f"random-{config.num_hidden_layers}x{config.hidden_size}-{raw['dtype']}"
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    values = NUMPY_DTYPES.get(raw["dtype"], np.dtype(ml_dtypes.bfloat16))
    tensors = {}
    for name, place in expected_tensors(config, ()).items():
        plain = rng.standard_normal(place.shape, np.float32) * 0.05
        tensors[name] = (np.ones_like(plain) if "norm" in name else plain).astype(values)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    return path


def memory_of(config: ModelConfig, itemsize: int, hi_share: float) -> tuple[int, int]:
    """(bytes of all experts in the low version, the spares and that share high; of all dense)."""
    layers, experts = sum(config.moe_layers), config.num_experts
    layout = config.slot_layout(itemsize, MIX)
    high = round(hi_share * layers * experts)
    slots = slots_for(layout, (high, layers * experts - high), SPARES)
    return slots * layout.slot_bytes, layers * experts * layout.records[0].nbytes


def arms(interval_text: str) -> list[Arm]:
    """All but the fixed map, which is made of what DynaExq has when it has settled."""
    mixed = {"hi": MIX[0], "lo": MIX[1], "interval": interval_text}
    return [
        Arm(BASELINE, {"precision": "int4"}),
        Arm("int8, static", {"precision": "int8"}),
        Arm("dense, paged", {}),
        Arm("DynaExq", {"precision": f"dynaexq,spares={SPARES}", **mixed}),
        Arm("DynaExq, paged", {"precision": "dynaexq,paged=true", **mixed}),
    ]


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each batch, prompt and arm, then one that compares DynaExq on with off."""
    model = Path(args.model) if args.model else checkpoint(args.directory, MODEL)
    try:
        config = parse_config(json.loads((model / "config.json").read_text()), str(model))
    except OSError as error:
        raise UserError(f"{model} is no checkpoint ({error})") from error
    least, dense = memory_of(config, 2, args.hi_share)
    memory = parse_size(args.memory) if args.memory else least
    generated = max(LONGER * args.max_tokens, SETTLING_TOKENS)
    longest = max(max(args.prompt) + args.max_tokens, min(args.prompt) + generated)
    if longest > config.max_position_embeddings:
        raise UserError(
            f"prompts of up to {max(args.prompt)} tokens and what follows are {longest}, more than "
            f"the model's {config.max_position_embeddings}; give fewer"
        )
    began = time.perf_counter()
    for batch in args.batch:
        with contextlib.ExitStack() as stack:
            _say(began, f"batch {batch}: engines")
            engines = start(stack, args, model, memory, batch, longest, config)
            every = [*engines]
            rates = measure_rates(engines["dense, paged"].engine.runner)
            for prompt in args.prompt:
                repeats = repeats_of(args, batch, prompt)
                _say(began, f"batch {batch}, prompt {prompt}: {repeats} repeats")
                runs = interleaved(args, engines, config, batch, prompt, repeats)
                place = {
                    "what": "measured",
                    "device": device_of(engines[BASELINE]),
                    "model": model.name,
                    "batch": batch,
                    "prompt": prompt,
                    "memory": memory,
                    "dense_bytes": dense,
                    "repeats": repeats,
                }
                for name in every:
                    yield place | {"arm": name} | figures(name, runs, engines[name], rates)
            # Nothing but the two, longer and more often: what the policy itself costs.
            pair = {name: engines[name] for name in ("DynaExq", "DynaExq off")}
            place = place | {"prompt": min(args.prompt), "repeats": args.pairs}
            _say(began, f"batch {batch}: DynaExq on and off, {args.pairs} repeats")
            runs = interleaved(args, pair, config, batch, min(args.prompt), args.pairs, LONGER)
            yield place | compared(runs, pair)


def start(
    stack: contextlib.ExitStack,
    args: argparse.Namespace,
    model: Path,
    memory: int,
    batch: int,
    longest: int,
    config: ModelConfig,
) -> dict[str, LLM]:
    """An engine for each arm, of equal expert budgets; all KV that the batch needs comes on top,
    the same for all."""
    tokens = -(-(longest + 64) // 64) * 64
    shared = dict(
        max_num_seqs=batch,
        max_model_len=tokens,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        progress=False,
    )

    def llm(options: dict[str, Any]) -> LLM:
        return stack.enter_context(LLM(model, expert_budget=memory, **shared, **options))

    engines = {arm.name: llm(arm.options) for arm in arms(args.interval)}
    # What DynaExq has when it has settled is what the fixed map has for good.
    settle(engines["DynaExq"], prompts_of(config, batch, min(args.prompt), 0))
    version = np.asarray(engines["DynaExq"].engine.runner.tables.version).astype(np.int8)
    path = args.directory / f"residency-{batch}.npy"
    np.save(path, version)
    engines["DynaExq off"] = llm({"precision": f"map={path}", "hi": MIX[0], "lo": MIX[1]})
    return engines


def settle(llm: LLM, prompts: Sequence[list[int]]) -> None:
    """Runs until the number of high experts stays, at most SETTLING times."""
    high = -1
    for _ in range(SETTLING):
        once(llm, prompts, SETTLING_TOKENS)
        before, high = high, residency(llm)[0]
        if high == before > 0:
            return


def repeats_of(args: argparse.Namespace, batch: int, prompt: int) -> int:
    """Fewer where prompts are many and long, so that the whole takes minutes; at least one."""
    return max(1, min(args.repeats, args.tokens_a_place // (batch * prompt)))


def prompts_of(config: ModelConfig, batch: int, prompt: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng([seed, prompt])
    return rng.integers(config.vocab_size, size=(batch, prompt)).tolist()


def interleaved(
    args: argparse.Namespace,
    engines: dict[str, LLM],
    config: ModelConfig,
    batch: int,
    prompt: int,
    repeats: int,
    longer: int = 1,
) -> dict[str, list[Run]]:
    """Arm → its runs; all arms of a repeat have the same prompts, and a first short run of each is
    left out. longer: so many times as many tokens are generated."""
    found: dict[str, list[Run]] = {name: [] for name in engines}
    for llm in engines.values():
        once(llm, prompts_of(config, batch, min(prompt, 128), 99), 4)
    for repeat in range(repeats):
        # The other way about every second time, so that nobody always follows the same one.
        names = [*engines] if repeat % 2 == 0 else [*reversed(engines)]
        for name in names:
            prompts = prompts_of(config, batch, prompt, 1 + repeat)
            found[name].append(once(engines[name], prompts, longer * args.max_tokens))
    return found


def once(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before, steps = llm.stats(), []
    llm.engine.listener = steps.append
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    llm.engine.drain()
    llm.engine.listener = None
    after = llm.stats()
    decode = [step for step in steps if step.kind == "decode"]
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    misses, moved = (
        sum(after[group][name] - before[group][name] for name in names)
        for group, names in (
            ("experts", ("fills", "read_through")),
            ("bytes", ("fill", "read_through")),
        )
    )
    return Run(
        ttft_s=[m.ttft_s for m in metrics if m.ttft_s is not None],
        tpot_s=[s for m in metrics for times in m.tpot_s for s in times],
        misses=misses,
        link_bytes=moved,
        active=float(np.mean([np.sum(np.asarray(step.output.paging.active)) for step in decode])),
        compiled=any(step.compiled for step in steps),
        precision=after.get("precision") or {},
    )


def device_of(llm: LLM) -> str:
    device = llm.engine.runner.device
    return "CPU engine" if device.platform == "cpu" else f"{device.device_kind} engine"


def figures(name: str, runs: dict[str, list[Run]], llm: LLM, rates: Rates) -> dict[str, Any]:
    """Medians over repeats; intervals where there are enough of them."""
    mine, others = runs[name], runs[BASELINE]
    ttft = [float(np.mean(run.ttft_s)) for run in mine]
    tpot = [float(np.mean(run.tpot_s)) for run in mine]
    base = [float(np.mean(run.tpot_s)) for run in others]
    ratios = [a / b for a, b in zip(tpot, base, strict=True)]
    precision = mine[-1].precision
    steps = len(mine[0].tpot_s) // len(mine[0].ttft_s)
    moved = float(np.mean([run.link_bytes for run in mine]))
    runner = llm.engine.runner
    least = min(record.nbytes for record in runner.layout.records)
    others = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    active = float(np.mean([run.active for run in mine]))
    return {
        "ttft_s": float(np.median(ttft)),
        "ttft_interval_s": bounds(ttft),
        "tpot_s": float(np.median(tpot)),
        "tpot_interval_s": bounds(tpot),
        "tpot_p99_s": float(np.percentile([s for run in mine for s in run.tpot_s], 99)),
        "to_static": float(np.median(ratios)),
        "to_static_interval": bounds(ratios),
        "misses": float(np.mean([run.misses for run in mine])),
        "link_bytes": moved,
        "link_floor_s": moved / rates.link,
        "read_floor_s": (active * least + others) / rates.memory,
        "memory_gb_per_s": rates.memory / 1e9,
        "link_gb_per_s": rates.link / 1e9,
        "compiled": sum(run.compiled for run in mine),
        "decode_steps": steps,
        "residency": residency(llm),
        "promotions": precision.get("promotions"),
        "demotions": precision.get("demotions"),
        "deferred": precision.get("deferred"),
    }


def residency(llm: LLM) -> list[int]:
    """Experts that are resident now, by version number."""
    tables = llm.engine.runner.tables
    version = np.asarray(tables.version)[np.asarray(tables.address) >= 0]
    return np.bincount(version, minlength=len(llm.engine.runner.stores)).tolist()


def compared(runs: dict[str, list[Run]], engines: dict[str, LLM]) -> dict[str, Any]:
    """DynaExq over the fixed map that has what it had when it had settled, repeat by repeat."""
    found: dict[str, Any] = {"arm": "DynaExq on / off"}
    found |= {f"residency {name}": residency(llm) for name, llm in engines.items()}
    first, last = (runs["DynaExq"][i].precision["promotions"] for i in (0, -1))
    found["promotions"] = last - first
    for figure in ("ttft_s", "tpot_s"):
        means = [
            [float(np.mean(getattr(run, figure))) for run in runs[name]]
            for name in ("DynaExq", "DynaExq off")
        ]
        ratios = [a / b for a, b in zip(*means, strict=True)]
        found[f"{figure[:-2]}_ratio"] = float(np.median(ratios))
        found[f"{figure[:-2]}_ratio_interval"] = bounds(ratios)
    return found


def bounds(values: Sequence[float]) -> tuple[float, float] | None:
    """The median's 95% interval; None of fewer than six values, which have none."""
    return median_interval(values) if len(values) >= 6 else None


def about(line: dict[str, Any]) -> str:
    share = line["memory"] / line["dense_bytes"]
    return (
        f"{line['device']}, {line['model']}: experts have {format_bytes(line['memory'])}, "
        f"{Share(min(share, 1.0))} of all dense ones"
    )


def _say(began: float, text: str) -> None:
    print(f"{time.perf_counter() - began:6.0f} s  {text}", file=sys.stderr, flush=True)
