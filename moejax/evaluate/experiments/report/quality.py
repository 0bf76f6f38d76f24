"""The report's table of quality."""

from __future__ import annotations

from moejax.evaluate.experiments.quality import compared_quality
from moejax.evaluate.experiments.records import Records

QUALITY_HEADINGS = ("text", "precision", "perplexity", "above {first}", "tokens")


def quality_headings(records: Records) -> list[str]:
    """QUALITY_HEADINGS, with the precision that others are compared with."""
    first = records.asked["precision"][0] if records.quality else ""
    return [name.format(first=first) for name in QUALITY_HEADINGS]


def quality_rows(records: Records) -> list[list[str]]:
    """A row for each text and precision: its perplexity, and by how much that is above the first
    precision's, with the 95% interval over pairs of windows."""
    rows = []
    for line in records.quality:
        first = records.asked["precision"][0]
        row = [line["text"], line["precision"], f"{line['perplexity']:.4f}", "–"]
        if line["precision"] != first:
            (other,) = [
                each
                for each in records.quality
                if (each["text"], each["precision"]) == (line["text"], first)
            ]
            found = compared_quality(line, other)
            row[-1] = f"{2**found.difference - 1:+.2%}"
            if found.low is not None and found.high is not None:
                row[-1] += f" [{2**found.low - 1:+.2%}, {2**found.high - 1:+.2%}]"
        rows.append([*row, str(line["tokens"])])
    return rows
