"""A cost model of round figures, for tests that add by hand."""

import dataclasses

from host_offload.sizing.cost_model import CostModel, StepCost

MODEL = CostModel(
    layers=2,
    experts=4,
    top_k=2,
    expert_bytes=100,
    chunk=64,
    row_tile=4,
    decode={
        8: StepCost(1000.0, 10.0, 1.0, 100.0, 50.0, filling=6.0, fill=4.0, read=8.0),
        16: StepCost(2000.0, 10.0, 1.0, 100.0, 50.0, filling=6.0, fill=4.0, read=8.0),
    },
    prefill=StepCost(5000.0, 500.0, 20.0, 200.0, 100.0, fill=40.0, read=60.0),
    control=3.0,
    recompute_per_token=11.0,
    kv_swap_per_byte=12.0,
    link_per_byte=0.05,
    cpu_expert=(70.0, 1.0),
    about={"machine": "here"},
)
"""Of two layers of four experts of 100 bytes, two a token; seconds."""

LOW = dataclasses.replace(
    MODEL,
    expert_bytes=25,
    decode={
        8: StepCost(800.0, 10.0, 1.0, 40.0, 20.0, filling=2.0, fill=2.0, read=2.0),
        16: StepCost(1800.0, 10.0, 1.0, 40.0, 20.0, filling=2.0, fill=2.0, read=2.0),
    },
    control=1.0,
)
"""Of the same model's experts in a version of a quarter of the bytes."""
