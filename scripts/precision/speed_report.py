"""Tables, crossovers and the plot of the command `speed`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.parts.text_table import aligned

Line = Mapping[str, Any]

PAIRS = (
    ("dense, paged", "int4, static"),
    ("dense, paged", "DynaExq"),
    ("DynaExq", "int4, static"),
    ("DynaExq", "int8, static"),
    ("int8, static", "int4, static"),
    ("dense, paged", "DynaExq, paged"),
    ("DynaExq", "DynaExq, paged"),
)
"""Arms whose crossover is named: from where on the first one is faster than the second."""


# ---- predicted


def predicted_table(lines: Sequence[Line], figure: str = "tpot_s") -> Iterator[str]:
    """Milliseconds; a row for each batch, prompt and arm, a column for each memory."""
    shares = sorted({line["share"] for line in lines})
    rows = []
    for place, of_arm in _grouped(lines, ("batch", "prompt", "arm")):
        cells = {line["share"]: line for line in of_arm}
        row: dict[str, Any] = dict(zip(("batch", "prompt", "arm"), place, strict=True))
        for i, share in enumerate(shares):
            value = cells[share].get(figure) if share in cells else None
            row[f"at{i}"] = "–" if value is None else f"{value * 1e3:.2f}"
        rows.append(row)
    columns = [(name, "{" + name + "}") for name in ("batch", "prompt", "arm")]
    columns += [(f"{share:.0%}", "{at" + str(i) + "}") for i, share in enumerate(shares)]
    yield from aligned(columns, rows)


def detail_table(lines: Sequence[Line]) -> Iterator[str]:
    """Every line, with its floors."""
    shown = [
        {
            **line,
            "memory_gib": line["memory"] / 2**30,
            **{
                name: f"{line[f'{name}_s'] * 1e3:.2f}"
                for name in (
                    *("ttft", "ttft_last", "tpot", "tpot_p99", "compute"),
                    *("read_floor", "link_floor"),
                )
            },
        }
        for line in lines
        if line["tpot_s"] is not None
    ]
    yield from aligned(
        [
            ("batch", "{batch}"),
            ("prompt", "{prompt}"),
            ("memory", "{share:.0%}"),
            ("GiB", "{memory_gib:.1f}"),
            ("arm", "{arm}"),
            ("with", "{note}"),
            ("TTFT ms", "{ttft}"),
            ("last", "{ttft_last}"),
            ("TPOT ms", "{tpot}"),
            ("p99", "{tpot_p99}"),
            ("compute", "{compute}"),
            ("read floor", "{read_floor}"),
            ("link floor", "{link_floor}"),
            ("misses", "{misses:.1f}"),
            ("staged", "{staged:.2f}"),
        ],
        shown,
    )


# ---- crossovers


def share_crossovers(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """For each batch, prompt and pair the memory from which on the first arm's TPOT is below the
    second's. share: the least such on the grid, None: there is none; below: the next smaller one,
    where it is not."""
    for (batch, prompt), of_place in _grouped(lines, ("batch", "prompt")):
        for first, second in PAIRS:
            found = _from(of_place, "share", first, second)
            if found is not None:
                yield {
                    "what": "predicted crossover",
                    "batch": batch,
                    "prompt": prompt,
                    "first": first,
                    "second": second,
                    **dict(zip(("share", "below"), found, strict=True)),
                }


def batch_crossovers(lines: Sequence[Line], what: str) -> Iterator[str]:
    """The batches from which on arms change places, at one memory."""
    for (prompt,), of_place in _grouped(lines, ("prompt",)):
        for first, second in PAIRS:
            for one, other in ((first, second), (second, first)):
                found = _from(of_place, "batch", one, other)
                if found is not None and found[0] is not None and found[1] is not None:
                    yield (
                        f"{what}, prompt {prompt}: {one} is faster than {other} from batch "
                        f"{found[0]} on, not at {found[1]}"
                    )


def _from(
    lines: Sequence[Line], axis: str, first: str, second: str
) -> tuple[Any | None, Any | None] | None:
    """(least value of the axis from which on `first` is faster throughout, the one before it);
    None where they never both run."""
    values = {name: {} for name in (first, second)}
    for line in lines:
        if line["arm"] in values and line["tpot_s"] is not None:
            values[line["arm"]][line[axis]] = line["tpot_s"]
    common = sorted(values[first].keys() & values[second].keys())
    if not common:
        return None
    start = len(common)
    while start and values[first][common[start - 1]] < values[second][common[start - 1]]:
        start -= 1
    least = common[start] if start < len(common) else None
    return least, common[start - 1] if start else None


def crossover_text(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each pair and prompt, batches together that are alike."""
    for (first, second, prompt), of_pair in _grouped(found, ("first", "second", "prompt")):
        parts = []
        for (share, below), same in _grouped(of_pair, ("share", "below")):
            batches = ", ".join(str(x["batch"]) for x in same)
            if share is None:
                where = f"never (up to {below:.0%})"
            elif below is None:
                where = f"from {share:.0%} on, the least at which both run"
            else:
                where = f"from {share:.0%} on (not at {below:.0%})"
            parts.append(f"batch {batches} {where}")
        yield f"prompt {prompt}: {first} is faster than {second}: {'; '.join(parts)}"


def overheads(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """DynaExq over the fixed map of the same residency, TPOT."""
    for place, of_place in _grouped(lines, ("batch", "prompt", "share")):
        arms = {line["arm"]: line for line in of_place}
        on, off = arms.get("DynaExq"), arms.get("DynaExq off")
        if on and off and on["tpot_s"] is not None:
            yield {
                **dict(zip(("batch", "prompt", "share"), place, strict=True)),
                "ratio": on["tpot_s"] / off["tpot_s"],
                "staged": on["staged"],
            }


def overhead_text(lines: Sequence[Line]) -> Iterator[str]:
    found = list(overheads(lines))
    for (batch,), of_batch in _grouped(found, ("batch",)):
        worst = max(of_batch, key=lambda x: x["ratio"])
        over = sum(x["ratio"] > 1.05 for x in of_batch)
        yield (
            f"batch {batch}: DynaExq on / off, TPOT at most {worst['ratio']:.3f} (prompt "
            f"{worst['prompt']}, {worst['share']:.0%}, {worst['staged']:.2f} transitions a step); "
            f"above 1.05 in {over} of {len(of_batch)} places"
        )


def _grouped(lines: Sequence[Line], names: Sequence[str]) -> Iterator[tuple[tuple, list[Line]]]:
    """Lines that agree in these, in the order in which they first come."""
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    yield from groups.items()


# ---- plot


def draw(lines: Sequence[Line], path: Path, title: str) -> None:
    """TPOT (mean, and p99 dashed) against memory, a panel for each of up to three batches and
    prompts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [line for line in lines if line["tpot_s"] is not None and line["arm"] != "DynaExq off"]
    batches = _three(sorted({line["batch"] for line in shown}))
    prompts = _three(sorted({line["prompt"] for line in shown}))
    figure, axes = plt.subplots(
        *(len(batches), len(prompts)),
        figsize=(4 * len(prompts), 3 * len(batches)),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    colours = dict(
        zip(dict.fromkeys(x["arm"] for x in shown), itertools.cycle("krbgmc"), strict=False)
    )
    for (i, batch), (j, prompt) in itertools.product(enumerate(batches), enumerate(prompts)):
        panel = axes[i, j]
        for arm, colour in colours.items():
            mine = [x for x in shown if (x["arm"], x["batch"], x["prompt"]) == (arm, batch, prompt)]
            mine.sort(key=lambda x: x["share"])
            at = [100 * x["share"] for x in mine]
            panel.plot(at, [1e3 * x["tpot_s"] for x in mine], f"{colour}-", label=arm, marker=".")
            panel.plot(at, [1e3 * x["tpot_p99_s"] for x in mine], f"{colour}:", linewidth=0.8)
        panel.set(yscale="log", title=f"batch {batch}, prompt {prompt}")
        panel.grid(alpha=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("memory for experts, % of all dense")
    for panel in axes[:, 0]:
        panel.set_ylabel("TPOT ms, predicted")
    axes[0, -1].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _three(values: Sequence[int]) -> list[int]:
    """The first, the middle and the last."""
    return sorted({values[0], values[len(values) // 2], values[-1]})
