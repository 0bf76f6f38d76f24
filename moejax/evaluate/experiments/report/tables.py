"""A report's tables beside those of its panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moejax.evaluate.experiments.records import Records
from moejax.evaluate.experiments.report.content import summarized
from moejax.evaluate.experiments.report.memory_tables import SHARED, SHARED_HEADINGS, shared_rows
from moejax.evaluate.experiments.report.places import BESIDE, BESIDE_HEADINGS, beside_baseline
from moejax.evaluate.experiments.report.predictions import (
    PREDICTED,
    PREDICTED_HEADINGS,
    prediction_rows,
)
from moejax.evaluate.experiments.report.quality_tables import (
    PRECISION_HEADINGS,
    PRECISIONS,
    QUALITY_HEADINGS,
    headings,
    precision_rows,
    quality_rows,
)
from moejax.evaluate.experiments.report.speed import SPEED, SPEED_HEADINGS, speed_rows


class Table(NamedTuple):
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def other_tables(records: Records) -> Iterator[Table]:
    """Those that the records have something for."""
    baseline = records.asked["baseline"]
    if rows := shared_rows(records):
        yield Table(SHARED.format(memory=records.asked["memory"]), SHARED_HEADINGS, rows)
    if rows := precision_rows(records, summarized(records)):
        title = PRECISIONS.format(baseline=baseline)
        yield Table(title, headings(PRECISION_HEADINGS, records), rows)
    if rows := quality_rows(records):
        yield Table("Quality", headings(QUALITY_HEADINGS, records), rows)
    if rows := prediction_rows(summarized(records)):
        yield Table(PREDICTED, PREDICTED_HEADINGS, rows)
    if rows := speed_rows(records):
        yield Table(SPEED, SPEED_HEADINGS, rows)
    if rows := beside_baseline(records):
        yield Table(BESIDE.format(baseline=baseline), BESIDE_HEADINGS, rows)
