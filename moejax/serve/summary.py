"""The short report of a run that the command line prints on stderr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from host_offload.memory.budget import format_bytes


def format_summary(stats: Mapping[str, Any]) -> str:
    """The dict of `LLM.stats` as aligned lines of text, without a newline at the end.

    A time or rate that does not exist yet (no token, no expert needed) is None in stats and a dash
    here.
    """
    times, experts, moved = stats["time"], stats["experts"], stats["bytes"]
    ttft, tpot, kv = stats["ttft_s"], stats["tpot_s"], stats["kv"]
    lines = {
        "model": f"{stats['model']}, {stats['dtype']} on {stats['device']}, jax {stats['jax']}",
        "tokens": (
            f"{stats['prompt_tokens']} prompt, {stats['generated_tokens']} generated, "
            f"{_number(stats['tokens_per_s'], '.1f')} tokens/s"
        ),
        "latency": (
            f"first token {_ms(ttft['mean'])}; then per token mean {_ms(tpot['mean'])}, "
            f"p99 {_ms(tpot['p99'])}"
        ),
        "start": f"load {times['load_s']:.2f} s, compile {times['compile_s']:.2f} s",
        "experts": (
            f"hit rate {_number(experts['hit_rate'], '.1%')} of {experts['activations']} "
            f"activations ({experts['fills']} fills, {experts['read_through']} read through), "
            f"{stats['eviction']}"
        ),
        "moved": (
            f"{format_bytes(moved['fill'])} filled, {format_bytes(moved['read_through'])} read "
            f"through"
        ),
        "arena": _arena(stats["arena"]),
        "kv": (
            f"{kv['prefix_hit_tokens']} tokens shared, {kv['session_hit_tokens']} of sessions; "
            f"{kv['preemptions']} preemptions; {format_bytes(kv['swapped_out_bytes'])} swapped "
            f"out, {format_bytes(kv['swapped_in_bytes'])} in"
        ),
        "ops": ", ".join(f"{op} {name}" for op, name in stats["ops"].items()),
    }
    text = [f"{name:<8} {line}" for name, line in lines.items()]
    text += [f"{'note':<8} {note}" for note in stats["notes"]]
    return "\n".join(text)


def _arena(arena: Mapping[str, Any]) -> str:
    cells = _range(arena["cells_per_layer"])
    return (
        f"{format_bytes(arena['bytes'])} = {arena['slots']} slots of "
        f"{format_bytes(arena['slot_bytes'])}: {arena['expert_slots']} experts ({cells} a layer, "
        f"{arena['cells_used']} in use), {arena['kv_slots']} KV "
        f"({arena['kv_pages_used_peak']} of {arena['kv_pages']} pages at peak), "
        f"{arena['free_slots']} free"
    )


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low}–{high}"


def _number(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g} ms"
