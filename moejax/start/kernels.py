"""Chooses the kernels that a model runs, by what was verified on this device."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

import jax

from host_offload.memory.layout import SlotLayout
from moejax.cache import checked_folder, use_compilation_cache
from moejax.checkpoints.tensors import layer_params, param_shape
from moejax.errors import user_errors
from moejax.models.attention.grouped_query import norms_apart
from moejax.models.config import ModelConfig
from moejax.models.family import Parts
from moejax.models.model_config import SECOND
from moejax.step.step_parts import StepSpec
from pallas_kernels import Ops
from pallas_kernels.cpu.library import instruction_set, why_not_cpu
from pallas_kernels.dispatch import KERNELS
from pallas_kernels.expert_ffn import why_not_mosaic
from pallas_kernels.mosaic import why_not_widths
from pallas_kernels.records.versions import Formats, VersionFormats
from pallas_kernels.verification import (
    NOT_CHECKED,
    SHIPPED,
    Check,
    Job,
    ModelShape,
    Outcome,
    checks,
    current,
    require_verified,
    why_no_kernels,
)
from pallas_kernels.verification.table import Entry

log = logging.getLogger("moejax")


def are_checked(device: jax.Device) -> bool:
    """Whether kernels run on this device only after checks. Interpreted ones need none."""
    return device.platform == "gpu"


@functools.cache
def known_outcomes(device: jax.Device) -> Mapping[str, Entry]:
    """Returns the outcomes of checks that this process goes by: those that were known when it first
    asked, so that all its models run the same kernels. Raises UserError for a damaged table."""
    with user_errors():
        return current(device, SHIPPED, checked_folder())


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """Which kernels a start runs of those that `ops` leaves to it."""

    declined: Mapping[str, str]
    """Op that runs in XLA → why not its kernel."""
    tried: StepSpec
    """The steps with every kernel that was found right, whether or not the whole step was."""
    specify: Callable[[Mapping[str, str]], StepSpec]
    """Makes the steps with these kernels declined."""
    asked: Mapping[str, str]
    """Op → the implementation that options name, or "auto"."""
    arena_bytes: int

    @property
    def waiting(self) -> bool:
        """Whether a check did not run yet."""
        return NOT_CHECKED in self.declined.values()

    def note(self) -> str:
        """Returns two lines for people about what was declined, "" if nothing was."""
        if not self.declined:
            return ""
        failed = list(dict.fromkeys(why for why in self.declined.values() if why != NOT_CHECKED))
        reason = failed[0] if failed else NOT_CHECKED
        more = f" (and {len(failed) - 1} others)" if len(failed) > 1 else ""
        then = "moejax check-gpu tries again; please report it"
        if self.waiting:
            then = "the checks run beside this process and count from the next start"
        return f"in XLA, not as kernels: {', '.join(self.declined)}; {reason}{more}\n{then}"


def choose_kernels(
    specify: Callable[[Mapping[str, str]], StepSpec],
    asked: Mapping[str, str],
    known: Mapping[str, Entry],
    arena_bytes: int,
) -> KernelChoice:
    """Declines the kernels that no check of this device has found right, and all of them if a whole
    step with the others was not right. Only ops that are "auto" are declined.

    - `known`: outcomes of checks on this device.
    - Others: see KernelChoice.
    """
    declined: dict[str, str] = {}
    while True:
        steps = specify(declined)
        found = why_no_kernels(start_checks(steps, arena_bytes), known)
        new = {op: why for op, why in found.items() if asked[op] == "auto" and op not in declined}
        if not new:
            break
        declined |= new
    whole = known.get(step_key(steps.config, steps.dtype, steps.ops))
    if whole is None or whole.why:
        why = NOT_CHECKED if whole is None else whole.why
        declined |= {op: why for op in steps.ops.kernels() if asked[op] == "auto"}
    return KernelChoice(declined, steps, specify, asked, arena_bytes)


def step_key(config: ModelConfig, dtype: str, ops: Ops) -> str:
    """Returns the key of the check of a whole step with these kernels."""
    shape = kernel_shape(config, dtype, config.slot_layout(itemsize=2))
    kernels = [
        op if name == "pallas" else (op, name)
        for op, name in ops.chosen().items()
        if name in KERNELS
    ]
    digest = hashlib.sha256(repr((shape, kernels)).encode()).hexdigest()[:12]
    sizes = f"{config.num_experts} experts {config.moe_intermediate_size}x{config.hidden_size}"
    return f"step {sizes}, {len(kernels)} kernels {digest} {dtype}"


def without_mosaic(
    config: ModelConfig, dtype: str, layout: SlotLayout, formats: Formats | None
) -> dict[str, str]:
    """Returns the ops whose Mosaic kernel this model cannot use, each with the reason."""
    found: dict[str, str] = {}
    for run in config.page_runs:
        shape = kernel_shape(config.of_layer(run.start), dtype, layout, formats)
        heads = () if shape.latent else (shape.head_dim,)  # some families normalise head by head
        widths = {
            "rms_norm": (shape.hidden, *shape.other_norms, *heads),
            "linear": [
                width for outputs, inputs, *_ in shape.products for width in (outputs, inputs)
            ],
            "expert_ffn": (layout.hidden, layout.records[0].width),
        }
        found |= {op: why for op, of in widths.items() if (why := why_not_widths(op, of))}
    record = layout.records[0]
    dense = formats or (VersionFormats(record, record),)
    if reason := why_not_mosaic(dense, config.expert_activation, layout.slot_rows):
        found["expert_ffn"] = reason
    return found


def kernel_job(steps: StepSpec, arena_bytes: int) -> list[Check]:
    """Returns start_checks in the process that runs them."""
    use_compilation_cache()
    return start_checks(steps, arena_bytes)


def verify_kernels(steps: StepSpec, device: jax.Device, arena_bytes: int) -> None:
    """Makes sure that every kernel of these steps was found right on this device: from a table,
    else by running the checks once, in processes of their own, and keeping the results in the cache
    directory. Kernels that only other starts of the model run are not checked.

    - `arena_bytes`: size of the arena; it decides which kernels run.

    Raises UserError for a configuration that is wrong.
    """

    def report(outcome: Outcome) -> None:
        log.debug("the kernel for %s is right: %.1e", outcome.key, outcome.error)

    job = Job(kernel_job, (steps, arena_bytes))
    with user_errors():
        wanted = start_checks(steps, arena_bytes)
        require_verified(job, wanted, device, checked_folder(), report)


def start_checks(steps: StepSpec, arena_bytes: int) -> list[Check]:
    """Returns the checks of the kernels that a start with these steps and this arena runs. Other
    starts of the model, with more sequences at once or arrays of other sizes, run others."""
    layers, experts = sum(steps.config.moe_layers), steps.config.num_experts
    if steps.formats is None:
        records = [record.nbytes for record in steps.layout.records]
    else:
        records = [version.store.nbytes for version in steps.formats]
    arena = arena_bytes > NARROW_BYTES
    # One kernel of an op that reads both arrays may address either of them.
    both = {arena, *(layers * experts * nbytes > NARROW_BYTES for nbytes in records)}
    if steps.separate:  # an expert without a cell is computed in a record of its own
        both = {arena, max(records) > NARROW_BYTES}

    def needed(check: Check) -> bool:
        widths = {None, *both} if check.stores is not None else {None, arena}
        # One bucket more: 48 rows run in one of 48, whose tiles are those of 64.
        runs = not check.rows or min(check.rows) < 2 * steps.shapes.rows
        return check.wide in widths and runs

    config = steps.config
    shapes = dict.fromkeys(
        kernel_shape(config.of_layer(run.start), steps.dtype, steps.layout, steps.formats)
        for run in config.page_runs
    )
    return [c for shape in shapes for c in checks(shape, steps.ops) if needed(c)]


def native_note(steps: StepSpec, platform: str) -> str:
    """Returns a line for people about the native CPU ops, or "" if there is nothing to say."""
    if "cpu" in steps.ops.chosen().values():
        return f"native CPU ops with the {instruction_set()} instructions"
    reason = why_not_cpu() if platform == "cpu" else None
    return f"{reason}; all ops run in XLA" if reason else ""


def kernel_shape(
    config: ModelConfig, dtype: str, layout: SlotLayout, formats: Formats | None = None
) -> ModelShape:
    """Returns what decides the configurations of a model's kernels.

    - `formats`: the formats of the run's versions; None: dense alone.
    """
    layers = [
        {key.removeprefix(SECOND): parts for key, parts in layer_params(config, run.start).items()}
        for run in config.runs
    ]
    names = {key for params in layers for key in params}
    norms = {key: param_shape(p[key])[0] for p in layers for key in p if key in _OTHER_NORMS}
    # kv_write normalises head by head; otherwise q and k have rms_norms of their own.
    by_head = norms.get("q_norm") == config.head_dim and not norms_apart(config)
    if by_head:
        norms = {key: norms[key] for key in norms.keys() & _STATE_NORMS}
    page = config.page(layout.page.block_size)
    shape = ModelShape(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.num_experts,
        rule=config.route_rule,
        heads=config.num_attention_heads,
        kv_heads=page.kv_heads,
        head_dim=page.head_dim,
        products=_products(config, dtype, layers),
        block_size=page.block_size,
        window=config.sliding_window if any(config.windows) else None,
        sinks="sinks" in names,
        activation=config.expert_activation,
        biases=config.expert_bias,
        gated=not config.ungated,
        dtype=dtype,
        latent=page.latent,
        **config.attention.kernel_shape(),
        qk_norm=by_head,
        other_norms=tuple(sorted({*norms.values()} - {config.hidden_size})),
        correction="correction" in names,
        norm="layer_norm" if "input_norm_bias" in names or config.mean_norms else "rms_norm",
        vocabulary=config.vocab_size,
        squares=config.attention.takes_squares
        and config.residual_multiplier == 1
        and "post_norm" in names
        and not {"post_norm_bias", "mlp_out_norm"} & names,
    )
    if config.state is not None:
        of_state = config.state.kernel_shape()
        page = config.state_page(layout.page.block_size, dtype)
        shape = dataclasses.replace(shape, state_page=page[:2], **of_state)
    if formats is None:
        return shape
    versions = tuple((f.cell.version, f.store.version) for f in formats)
    return dataclasses.replace(shape, versions=versions)


NARROW_BYTES = 1 << 32
"""The most bytes of an array that kernels address with 32 bits."""

_STATE_NORMS = frozenset({"state_norm", "step_norm", "key_norm", "read_norm"})
_OTHER_NORMS = _STATE_NORMS | {"q_norm", "k_norm", "q_a_norm"}
_NOT_LINEAR = frozenset({"kv_b", "a_log"})
_WIDE_RESULT = frozenset(
    {"router", "gate_up", "up", "shared_gate_up", "shared_up", "shared_gate", "index_weights"}
)
"""Parameters whose products LayerStack computes in float32."""


def _products(
    config: ModelConfig, dtype: str, layers: Sequence[Mapping[str, Parts]]
) -> tuple[tuple[int, int, bool, str], ...]:
    """Returns the products of every layer and of the head, as ModelShape.products has them."""
    found = {(config.vocab_size, config.hidden_size, config.lm_head_bias, "float32")}
    for params in layers:
        for key, parts in params.items():
            shape = param_shape(parts)
            if len(shape) == 2 and key not in _NOT_LINEAR:
                out = "float32" if key in _WIDE_RESULT else dtype
                found.add((*shape, f"{key}_bias" in params, out))
    return tuple(sorted(found))
