"""Draws hit rate and speed by budget from the records of scripts/experiments/budget_curve.yaml:

python -m scripts.site.curves DIR OUT.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def share_of(budget: str) -> float:
    """Percent of the experts."""
    return float(budget.rstrip("%"))


def draw(records: list[dict], out: str) -> None:
    """Two plots beside each other: hits of decode steps, tokens a second with their quartiles."""
    plt.rcParams.update({"svg.hashsalt": "moejax", "font.size": 11, "svg.fonttype": "none"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    measured = [r for r in records if r["mode"] == "measured" and not r["error"]]
    hits: dict[float, list[float]] = {}
    speeds: dict[str, dict[float, list[float]]] = {}
    needed: dict[str, int] = {}
    for record in measured:
        budget = record["budget"]
        needed[budget] = record["decode_hits"] + record["decode_misses"]
        hits.setdefault(share_of(budget), []).append(record["decode_hits"] / needed[budget])
        speed = 1 / record["tpot_p50_s"]
        rate = speeds.setdefault(str(record["link_rate"]), {})
        rate.setdefault(share_of(budget), []).append(speed)
    shown = [100 * statistics.mean(found) for found in hits.values()]
    left.plot(list(hits), shown, "o-", label="LRU")
    bound = {
        share_of(r["budget"]): 100 * (1 - r["decode_misses"] / needed[r["budget"]])
        for r in records
        if r["mode"] == "bound" and r["decode_misses"] is not None  # a step needs more cells
    }
    left.plot(list(bound), list(bound.values()), "--", color="gray", label="MIN, the optimum")
    left.legend()
    left.set(xlabel="budget, % of the experts", ylabel="hit rate, %", ylim=(0, 102))
    for rate, found in speeds.items():
        middle = [statistics.median(one) for one in found.values()]
        ends = [statistics.quantiles(one, n=4) for one in found.values()]
        (line,) = right.plot(list(found), middle, "o-", label=f"link of {rate}")
        lower, upper = [q[0] for q in ends], [q[2] for q in ends]
        right.fill_between(list(found), lower, upper, alpha=0.15, color=line.get_color())
    right.set(xlabel="budget, % of the experts", ylabel="tokens a second, batch 1")
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    lines = (Path(sys.argv[1]) / "records.jsonl").read_text().splitlines()
    draw([json.loads(line) for line in lines], sys.argv[2])
