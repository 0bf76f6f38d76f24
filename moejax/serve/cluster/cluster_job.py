"""A file job on several machines: lines of many files in, parts of a directory out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from moejax.errors import UserError
from moejax.serve.batch.job import Job, OpenJob, surveyed
from moejax.serve.cluster.inputs import ClusterInputs
from moejax.serve.cluster.part_files import FORMATS, open_parts


@contextlib.contextmanager
def open_cluster_job(job: Job, paths: Sequence[str], format: str = "jsonl") -> Iterator[OpenJob]:
    """`open_job` for the files at these paths and a directory, job.output, of parts in this format.

    The job is the same otherwise: lines, results, ids, seeds, what is refused, and what happens
    when it is given again. Its `run` takes a Fleet.
    """
    if format not in FORMATS:
        raise UserError(f"the format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if "-" in paths or job.output == "-":
        raise UserError(
            "a job on several machines goes on after a kill, so it reads and writes "
            "files, not - for standard input or output"
        )
    if os.path.exists(job.output) and not os.path.isdir(job.output):
        raise UserError(
            f"{job.output} is a file, and the output of a job on several machines is a directory; "
            "choose another --output"
        )
    inputs = ClusterInputs(paths)
    with open_parts(job.output, format, overwrite=job.overwrite) as results:
        if any(name.startswith(f"{results.directory}/") for _, name in inputs.files):
            raise UserError(f"{job.output} is both --input and --output; choose another --output")
        yield surveyed(job, inputs, results, inputs.place)
