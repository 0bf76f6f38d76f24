"""The page of a day with a GPU: what ran, what it found, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.check.day_steps import STEPS, Step

TAIL = 40
"""Lines of output that a step shows: a whole table, or the end of what went wrong."""

GOOD = ("done",)


def page(results: Mapping[str, Any]) -> str:
    """Markdown of results, as gpu_day writes them."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    steps = results["steps"]
    yield "# A day with a GPU" + (": rehearsed on a CPU" if results["rehearsed"] else "")
    yield ""
    if results["rehearsed"]:
        yield (
            "Small sizes on a CPU, steps beside each other: it shows that every command runs, and "
            "no figure of a GPU. The column `answers` says what a GPU's day would.\n"
        )
    if machine := _machine(steps):
        yield machine
        yield ""
    counts: dict[str, int] = {}
    for step in STEPS:
        status = steps.get(step.name, {}).get("status", "left")
        counts[status] = counts.get(status, 0) + 1
    yield ", ".join(f"{count} {status}" for status, count in counts.items()) + "."
    yield ""
    yield from _table(
        ("step", "answers", "status", "seconds", "of processors"),
        [
            (step.name, step.answers, found.get("status", "left"), *_seconds(found))
            for step in STEPS
            for found in [steps.get(step.name, {})]
        ],
    )
    for step in STEPS:
        if step.name in steps:
            yield from _section(step, steps[step.name])


def _seconds(found: Mapping[str, Any]) -> tuple[str, ...]:
    """By the clock, and of processors; – of a step that did not run."""
    return tuple(f"{found[n]:.0f}" if n in found else "–" for n in ("seconds", "processor_seconds"))


def _section(step: Step, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## {step.name}: {found['status']}\n"
    if found.get("why"):
        yield found["why"] + "\n"
    if "command" in found:
        yield f"`{found['command']}`\n"
    if step.name == "doctor" and found["found"]:
        yield from _doctor(found["found"][0])
    elif step.columns and found.get("found"):
        rows = [[_shown(line.get(name)) for name in step.columns] for line in found["found"]]
        yield from _table(step.columns, rows)
        yield from _profiles(found["found"])
    good, tail, errors = found["status"] in GOOD, found.get("tail", []), found.get("errors", [])
    # What a good step says of its progress is in work/logs.
    shown = (tail or errors) if good else [*tail, *errors]
    if shown and not (good and found.get("found")):
        yield "```text"
        yield from shown
        yield "```"


def _doctor(found: Mapping[str, Any]) -> Iterator[str]:
    for problem in found["problems"]:
        yield f"- wrong: {problem['what']}; `{problem['mend']}`"
    if not found["problems"]:
        yield "Nothing is wrong."
    yield ""
    runs = found["runs"]
    for name in sorted({*runs.values()}):
        yield f"- runs as {name}: {', '.join(op for op, chosen in runs.items() if chosen == name)}"


def _profiles(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The costliest kernels of the first line that was profiled."""
    for line in lines:
        if profile := line.get("profile"):
            idle = profile["idle_percent"]
            yield f"\nbatch {line['batch']}, {line['cells_per_layer']} cells: idle {idle:.1f}%\n"
            kernels = profile["kernels"][:10]
            rows = [(k["name"][:60], _shown(k["calls"]), _shown(k["us"])) for k in kernels]
            yield from _table(("kernel", "calls a step", "µs a step"), rows)
            return


def _machine(steps: Mapping[str, Any]) -> str:
    found = steps.get("doctor", {}).get("found")
    if not found:
        return ""
    machine = found[0]["machine"]
    device = next(iter(machine["backend"]["devices"]), {})
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    gpu = ", ".join(f"{g['name']} (driver {g['driver']})" for g in machine["gpus"]) or "no GPU"
    link = machine["backend"].get("link")
    rate = f"; link {link / 1e9:.1f} GB/s" if link else ""
    return f"{gpu}; jax uses {device.get('kind', 'nothing')}; {versions}{rate}."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "–" if value is None else str(value)
