"""A cost model of round figures, for tests that add by hand."""

import dataclasses

import numpy as np

from host_offload.sizing.cost_model import CostModel, StepCost

MODEL = CostModel(
    layers=2,
    experts=4,
    top_k=2,
    expert_bytes=100,
    chunk=64,
    row_tile=4,
    decode={
        8: StepCost(step=1000.0, part=10.0, span=1.0, expert=100.0, tile=50.0),
        16: StepCost(step=2000.0, part=10.0, span=1.0, expert=100.0, tile=50.0),
    },
    prefill=StepCost(step=5000.0, part=500.0, span=20.0, expert=200.0, tile=100.0),
    fill=np.array([6.0, 4.0]),
    read_through=np.array([0.0, 8.0]),
    control=3.0,
    prefill_fill=40.0,
    prefill_read_through=60.0,
    recompute_per_token=11.0,
    kv_swap_per_byte=12.0,
    link_per_byte=0.05,
    cpu_expert=np.array([70.0, 1.0]),
    about={"machine": "here"},
)
"""Of two layers of four experts of 100 bytes, two a token; seconds."""

LOW = dataclasses.replace(
    MODEL,
    expert_bytes=25,
    decode={
        8: StepCost(step=800.0, part=10.0, span=1.0, expert=40.0, tile=20.0),
        16: StepCost(step=1800.0, part=10.0, span=1.0, expert=40.0, tile=20.0),
    },
    fill=np.array([2.0, 2.0]),
    read_through=np.array([0.0, 2.0]),
    control=1.0,
    prefill_fill=12.0,
)
"""Of the same model's experts in a version of a quarter of the bytes."""
