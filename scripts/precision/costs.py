"""Stated costs of a GPU for the command `speed`: a roofline of one model's steps in each version.

The figures are those measured on one H200 in ../shared/DESIGN.md, section 6, with its own kernels;
nothing here was measured on this machine, and moejax's kernels have not been timed there. What has
no measured figure is assumed and named so. A step is the sum of

  step      weights other than experts at the memory's rate, the overhead of its launches and small
            kernels, and the version's latency
  expert    a dense one's bytes at the memory's rate, times the version's factor
  span      64 tokens of KV of one row at the memory's rate
  a move    the version's bytes at the link's rate

A prefill step has the same step; a chunk of 64 tokens computes at the matrix rate what experts do
not; an expert (and each further 64 rows of it, since the kernel reads it again) is the larger of
reading and computing. Nothing overlaps: the engine moves experts in the step's own stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from host_offload.sizing.cost_model import CostModel, StepCost, Work
from moejax.checkpoints.random_model import expert_layout
from moejax.models.model_config import ModelConfig
from moejax.start.report.info import model_info
from pallas_kernels.paged_attention import SPAN
from pallas_kernels.records import RecordFormat

CHUNK, ROW_TILE = 64, 16


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How a version's expert products compare with dense ones."""

    factor: float
    """Seconds of one more expert over those of a dense one."""
    latency: float
    """Seconds that a step takes longer, however few experts it has."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Stated rates; bytes, operations and seconds."""

    link: float = 48e9
    memory: float = 3.4e12
    matrix: float = 4e14
    overhead: float = 1.5e-3
    decoding: Mapping[str, Decoding] = dataclasses.field(
        default_factory=lambda: {
            "dense": Decoding(1.0, 0.0),
            "int8": Decoding(0.71, 0.6e-3),
            "int4": Decoding(0.42, 1.2e-3),
        }
    )


SOURCES = (
    "link 48 GB/s: paged inside the jit (DESIGN section 6)",
    "memory 3.4 TB/s: what the MoE part of a step reaches (DESIGN: 3.3 to 3.4)",
    "overhead 1.5 ms: what DESIGN's whole steps (T = 1, 8, 32) take beyond reading at that rate",
    "int4: gate_up of 8 experts 39 µs, of 128 experts 112 µs, dense 29 and 202 µs (DESIGN): as "
    "lines, one more expert takes 0.42 of a dense one, and a step 48 × 1.5 × 16.6 µs = 1.2 ms more",
    "int8: ASSUMED halfway between dense and int4, no kernel was timed",
    "a step with any expert in int4 pays that latency whole, so DynaExq does in nearly every step",
    "matrix products 400 TFLOP/s in prefill steps: ASSUMED, 40% of the H200's dense bf16 peak",
)
"""Where the defaults come from, for people."""

DESIGN_STEPS = {1: 3.6e-3, 8: 9.0e-3, 32: 17.9e-3}
"""Rows → seconds of a whole step at context 1024, everything resident, uniform routing: probe9 for
1 and 8, for 32 probe8 (18.9 ms) less its 20 µs a layer of weight copies, which probe9 removed."""


def version_bytes(config: ModelConfig, version: str) -> int:
    """Bytes of one expert."""
    dense = expert_layout(config)
    return RecordFormat(version, dense.hidden, dense.width, dense.dtype).nbytes


def stated_costs(config: ModelConfig, machine: Machine, version: str, rows: int) -> CostModel:
    """The cost model of steps of up to so many rows with all experts in that version."""
    layers, k = sum(config.moe_layers), config.num_experts_per_tok
    dense, nbytes = expert_layout(config), version_bytes(config, version)
    how = machine.decoding[version]
    span_kv = SPAN * config.num_hidden_layers * 2 * config.kv_heads * config.kv_width * 2
    others = other_bytes(config)
    step = others / machine.memory + machine.overhead + how.latency
    expert = how.factor * dense.nbytes / machine.memory
    # A chunk's products with every weight that is no expert's; of attention, scores and values.
    products = 2 * CHUNK * (others - _head_bytes(config)) / 2 / machine.matrix
    heads = config.num_attention_heads * config.head_dim
    attention = 4 * CHUNK * SPAN * heads * config.num_hidden_layers / machine.matrix
    tile = max(expert, 2 * CHUNK * 3 * dense.width * dense.hidden / machine.matrix)
    move = nbytes / machine.link
    return CostModel(
        layers=layers,
        experts=config.num_experts,
        top_k=k,
        expert_bytes=nbytes,
        chunk=CHUNK,
        row_tile=ROW_TILE,
        decode={rows: StepCost(step, 0.0, span_kv / machine.memory, expert, expert)},
        prefill=StepCost(step, products, attention, tile, tile),
        fill=np.array([[1, move]]),
        read_through=np.array([[1, move]]),
        stage=np.array([[1, move]]),
        stage_list=0.0,
        control=0.0,
        prefill_fill=move,
        prefill_read_through=move,
        recompute_per_token=0.0,
        kv_swap_per_byte=1 / machine.link,
        memory_per_byte=1 / machine.memory,
        link_per_byte=1 / machine.link,
        about={"stated": dataclasses.asdict(machine)},
    )


def other_bytes(config: ModelConfig) -> int:
    """Weights that every step reads: all that are no expert's, but of the embedding only rows."""
    embedding = config.vocab_size * config.hidden_size * expert_layout(config).itemsize
    return model_info(config).device_bytes - (0 if config.tie_word_embeddings else embedding)


def _head_bytes(config: ModelConfig) -> int:
    """The output matrix, which is computed for a prompt's last token only."""
    return config.vocab_size * config.hidden_size * expert_layout(config).itemsize


def check(config: ModelConfig, machine: Machine) -> Iterator[str]:
    """The stated costs beside the whole steps that DESIGN measured."""
    model = stated_costs(config, machine, "dense", max(DESIGN_STEPS))
    for rows, measured in DESIGN_STEPS.items():
        seconds = uniform_step_s(model, rows)
        yield f"{rows} rows: {seconds * 1e3:.1f} ms stated, {measured * 1e3:.1f} ms in DESIGN"


def uniform_step_s(model: CostModel, rows: int, context: int = 1024) -> float:
    """A decode step in which every expert is as likely, everything resident."""
    absent = (1 - model.top_k / model.experts) ** rows
    experts = round(model.layers * model.experts * (1 - absent))
    return model.step_cost(rows).seconds(Work(rows, rows * context // SPAN, experts, 0))
