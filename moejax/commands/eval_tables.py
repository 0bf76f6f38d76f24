"""What ``moejax eval`` prints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from host_offload.memory.budget import format_bytes

if TYPE_CHECKING:
    from moejax.evaluate.comparison import Comparison
    from moejax.evaluate.evaluation import Likelihood, PerplexityResult


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other: the first column to the left, the others to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]) for row in cells
    )


def format_perplexity(result: PerplexityResult) -> str:
    """A row for each text, and one for all where there are several."""
    rows: list[tuple[str, Likelihood]] = [(text.name, text) for text in result.texts]
    if len(rows) > 1:
        rows.append(("all", result.total))
    cells = [("", "tokens", "scored", "bits/token", "bits/byte", "perplexity")]
    for name, found in rows:
        by_byte = "–" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
        counts = f"{found.tokens:,}", f"{found.scored_tokens:,}"
        figures = f"{found.bits_per_token:.4f}", by_byte, f"{found.perplexity:.4f}"
        cells.append((name, *counts, *figures))
    return aligned(cells)


def format_tasks(report: Mapping[str, Any]) -> str:
    """A row for each task's metric, with the harness's standard error."""
    cells = [("task", "metric", "documents", "value", "± stderr")]
    for task, figures in report["results"].items():
        documents = report["tasks"]["n-samples"].get(task, {}).get("effective", "")
        for name, value in figures.items():
            metric, _, kept = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not kept:
                continue
            error = figures.get(f"{metric}_stderr,{kept}")
            shown = f"{error:.4f}" if isinstance(error, int | float) else "–"
            label = metric if kept == "none" else name
            cells.append((task, label, str(documents), f"{value:.4f}", shown))
    return aligned(cells)


def format_comparison(found: Sequence[Comparison]) -> str:
    """A row for each figure of both runs."""
    cells = [("", "step", "figure", "pairs", "A", "B", "B − A", "95% interval")]
    for one in found:
        steps = {one.step_a, one.step_b}
        step = "–" if steps == {None} else "/".join(str(s) for s in dict.fromkeys(steps))
        interval = "–" if one.low is None else f"[{one.low:+.4f}, {one.high:+.4f}]"
        figures = f"{one.a:.4f}", f"{one.b:.4f}", f"{one.difference:+.4f}", interval
        cells.append((one.name, step, one.figure, str(one.pairs), *figures))
    return aligned(cells)


def format_cost(run: Mapping[str, Any]) -> str:
    """What a run of perplexity cost."""
    hit_rate = "–" if run["hit_rate"] is None else f"{run['hit_rate']:.1%}"
    lines = [
        f"speed    {run['computed_tokens']} tokens computed in {run['seconds']:.2f} s, of which "
        f"{run['compile_s']:.2f} s compiled; {run['tokens_per_s']:.0f} tokens/s",
        f"experts  hit rate {hit_rate} of {run['activations']} activations ({run['fills']} fills, "
        f"{run['read_through']} read through), {run['eviction']}",
        f"moved    {format_bytes(run['fill_bytes'])} filled, "
        f"{format_bytes(run['read_through_bytes'])} read through in "
        f"{run['prefill_steps']} prefill steps",
    ]
    return "\n".join(lines + [f"note     {note}" for note in run["notes"]])
