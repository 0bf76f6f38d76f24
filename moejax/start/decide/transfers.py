"""Whether transfers run beside compute, over a link of stated rate, and why they cannot."""

from __future__ import annotations

from host_offload.queue.transfer import QueueSpec
from moejax.errors import UserError
from moejax.start.settings import Settings
from moejax.step.parts import StepSpec, arena_ops


def queue_of(settings: Settings) -> QueueSpec | None:
    """The queue that was asked for; None: ops copy experts in their place, the fastest where
    nothing limits the link. Files are read by one."""
    options = settings.options
    if options.link_rate is None and options.link_latency is None and options.store != "file":
        return None
    if not options.chunk_bytes:
        raise UserError("chunk_bytes must be at least 1")
    return QueueSpec(
        rate=options.link_rate or 0.0,
        latency=options.link_latency or 0.0,
        threads=options.transfer_threads,
        chunk_bytes=options.chunk_bytes,
    )


def check_queue(settings: Settings, steps: StepSpec, platform: str) -> None:
    """Raises UserError where transfers beside compute were asked for and cannot be."""
    if steps.queue is None:
        return
    asked = "link_rate" if settings.options.link_rate is not None else "link_latency"
    if platform != "cpu":
        raise UserError(
            f"{asked} is for a CPU, whose transfers this library carries out; on a {platform} the "
            f"link is what it is: leave {asked} out, or use device='cpu'"
        )
    others = [
        op for op in arena_ops(steps.layout.page.latent > 0) if getattr(steps.ops, op) != "cpu"
    ]
    if others:
        raise UserError(
            f"{asked} needs native CPU ops, which wait for transfers; op {others[0]} is "
            f"{getattr(steps.ops, others[0])}: leave {asked} out, or use ops='cpu' "
            "(`python -m pallas_kernels.cpu` builds them)"
        )
    if settings.precision.in_transit:
        raise UserError(
            f"precision {settings.precision.name} decodes experts on their way, which {asked} does "
            "not; use another precision, or leave it out"
        )


def link_notes(queue: QueueSpec | None) -> list[str]:
    """What results must say of the link."""
    if queue is None or not (queue.rate or queue.latency):
        return []
    rate = f"{queue.rate / 1e9:.3g} GB/s" if queue.rate else "unlimited rate"
    return [f"experts pass a link of {rate}, {queue.latency * 1e6:.3g} us, beside compute"]
