"""The shapes and ops of a model's steps: what a start decides from the model alone."""

from __future__ import annotations

from host_offload.memory.layout import BLOCK_SIZES, SlotLayout
from moejax.checkpoints.tensors import layer_params
from moejax.models.attention import kind as attention
from moejax.models.config import ModelConfig
from moejax.step.step_parts import DECODE_TILE, StepShapes
from pallas_kernels import Ops
from pallas_kernels.dispatch import MADE_OF
from pallas_kernels.fill_ffn import why_not_pallas as fill_ffn_why_not
from pallas_kernels.paged_attention import SPAN
from pallas_kernels.paged_attention import why_not_pallas as attention_why_not
from pallas_kernels.records.versions import Formats
from pallas_kernels.route import why_not_pallas as route_why_not
from pallas_kernels.verification import FEW_ROWS

PREFILL_CHUNK = 64
"""Prompt tokens computed at once. A start-up shape: it decides bits (contract 1)."""

KERNEL_WAVES = 8
"""Waves of a prefill step with the expert kernel. The kernel reads an expert without a cell once
per 64 rows routed to it, so a prefill step wants cells for all experts. If not all fit, an eighth
of them fits."""


LEAST_CONTEXT = 1024
"""Fewest tokens of context for which a separate decode step is compiled. Below, fewer programs of
attention would save nothing (docs/explanation/kernels.md)."""

LEAST_PREFILL = 8
"""Chunks of the smallest prefill step that is compiled for fewer than all chunks."""

LEAST_NATIVE_PREFILL = 2
"""The same with native ops, whose steps compile in a second or two. Of a prompt of one chunk, two
layers of OLMoE spend 35 of 200 ms between native ops in a step of 8 chunks, 9 in a step of two."""

NATIVE_ROWS = 1, 8, 32, 128
"""Rows of the decode steps of native ops, if they are fewer than `max_num_seqs`. 31 idle rows take
a third of the time of a step of four layers of OLMoE, in what XLA computes between native ops."""

APART = 4
"""Ratio between one context length, or prefill size, that is compiled for and the next one."""


def step_shapes(
    layout: SlotLayout,
    *,
    rows: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    waves: int,
    bucketed: bool = False,
    prefill_bucketed: bool = False,
    native: bool = False,
    kernels: bool = False,
    drafts: bool = False,
) -> StepShapes:
    """Returns the start-up shapes for these limits. Attention reads whole spans, so the block table
    is a whole number of spans wide. A prefill step has at least one chunk and at most as many as
    all prompts can fill.

    - `bucketed`: whether decode is also compiled for fewer rows and shorter contexts. A kernel's
      grid is static, so smaller shapes need their own.
    - `prefill_bucketed`: whether prefill is also compiled for fewer chunks.
    - `native`: whether native ops compute all products. Then decode is also compiled for
      NATIVE_ROWS, though not for shorter contexts.
    - `kernels`: whether an op is a kernel. Then a few rows are rounded up to a number that the
      checks of kernels cover, since no start may run another number.
    - `drafts`: whether decode steps verify drafts.
    """
    spans = -(-max_model_len // SPAN)
    chunks = min(max_num_batched_tokens // PREFILL_CHUNK, rows * -(-max_model_len // PREFILL_CHUNK))
    if rows > DECODE_TILE or bucketed:
        rows = -(-rows // DECODE_TILE) * DECODE_TILE
    elif kernels:
        rows = next(few for few in (*FEW_ROWS, DECODE_TILE) if few >= rows)
    buckets = [rows]
    while bucketed and buckets[0] > DECODE_TILE:
        buckets.insert(0, -(-buckets[0] // (2 * DECODE_TILE)) * DECODE_TILE)
    if bucketed:
        # Attention has fewer idle programs, and routing has fewer rows to go through
        # (docs/explanation/kernels.md). Products have the tiles of 16 rows.
        buckets = [*FEW_ROWS, *buckets]
    elif native:
        buckets = [*(few for few in NATIVE_ROWS if few < rows), rows]
    contexts, prefills = [spans], [max(chunks, 1)]
    least = LEAST_NATIVE_PREFILL if native else LEAST_PREFILL
    while bucketed and contexts[0] * SPAN >= APART * LEAST_CONTEXT:
        contexts.insert(0, -(-contexts[0] // APART))
    while prefill_bucketed and prefills[0] >= APART * least:
        prefills.insert(0, -(-prefills[0] // APART))
    return StepShapes(
        rows=rows,
        buckets=tuple(buckets),
        chunk=PREFILL_CHUNK,
        prefill_chunks=prefills[-1],
        prefills=tuple(prefills),
        blocks=spans * (SPAN // layout.page.block_size),
        contexts=tuple(n * (SPAN // layout.page.block_size) for n in contexts),
        state_pages=layout.page.state_pages,
        read_pages=layout.page.state_pages if drafts else 0,
        waves=waves,
    )


def without_kernel(config: ModelConfig) -> dict[str, str]:
    """Returns the ops whose Pallas kernel this model cannot use, each with the reason. The
    reference op runs instead; the log and `stats` say so."""
    pages = [config.of_layer(run.start).page(BLOCK_SIZES[0]) for run in config.page_runs]
    attention_reasons = (why for page in pages if (why := attention_why_not(page)) is not None)
    reasons = {
        "route": route_why_not(config.route_rule),
        "paged_attention": next(attention_reasons, None),
    }
    found = {op: reason for op, reason in reasons.items() if reason is not None}
    return found | _xla_only(config)


def without_native(config: ModelConfig) -> dict[str, str]:
    """Returns the ops whose native CPU op this model cannot use, each with the reason."""
    found = _xla_only(config)
    if found:
        why = "XLA copies an arena to which its own ops and native ones write"
        found |= dict.fromkeys(("fill", "stage", "move"), why)
    if config.scoring_func == "sqrtsoftplus":
        found["route"] = "only XLA computes scores 'sqrtsoftplus'"
    if config.swiglu is not None and config.swiglu.shift != 1:
        found["expert_ffn"] = "only XLA computes a clamped SwiGLU without a shift"
    return found


def _xla_only(config: ModelConfig) -> dict[str, str]:
    return {
        op: f"only XLA computes {what}"
        for kind in config.attention_kinds
        for op, what in kind.xla_only.items()
    }


def apart(driver: str, formats: Formats | None) -> dict[str, str]:
    """Returns, like without_kernel, why ops that only the device driver's decode step fuses run
    apart."""
    versions = [(cell.version, store.version) for cell, store, _ in formats or ()]
    reason = fill_ffn_why_not(versions)
    if driver != "device":
        reason = f"the {driver} driver fills before it computes"
    return {} if reason is None else {"fill_ffn": reason}


def decodes_in_buckets(config: ModelConfig, ops: Ops) -> bool:
    """Whether decode is compiled for fewer rows too. This needs kernels that compute every product:
    XLA's products keep one number of rows (contract 1e), since in another program XLA fuses the
    same product with other neighbours."""
    return ops.are_kernels(*_products(config))


def prefills_in_buckets(config: ModelConfig, ops: Ops) -> bool:
    """Whether prefill is compiled for fewer chunks too, so that a short prompt need not write
    buffers of all. A row's bits must not depend on how many others there are, as for
    `decodes_in_buckets`; those of native ops do not either."""
    return is_native(config, ops) or decodes_in_buckets(config, ops)


def is_native(config: ModelConfig, ops: Ops) -> bool:
    """Whether native ops compute every product."""
    return all(getattr(ops, op) == "cpu" for op in ("head_linear", *_products(config)))


def _products(config: ModelConfig) -> list[str]:
    """Returns the ops that compute products."""
    of_kinds = [op for kind in config.attention_kinds for op in kind.products]
    return ["linear", "expert_ffn", "paged_attention", *of_kinds]


def ops_in_use(config: ModelConfig, ops: Ops) -> dict[str, str]:
    """Returns the implementation of each op that this model's steps have."""
    names = {key for run in config.runs for key in layer_params(config, run.start)}
    unused = {
        op for op in attention.OPS if not any(op in kind.ops for kind in config.attention_kinds)
    }
    # By "xla" it is fill and expert_ffn, whatever those are.
    unused |= {op for op in MADE_OF if getattr(ops, op) == "xla"}
    if ops.sample != "xla":
        unused.add("truncate")
    if "input_norm_bias" not in names and not config.mean_norms:
        unused.add("layer_norm")
    elif not any(name in names for name in ("q_norm", "q_a_norm")):
        unused.add("rms_norm")
    return {op: name for op, name in ops.chosen().items() if op not in unused}
