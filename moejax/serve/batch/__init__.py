"""File jobs: generate for every line of a JSON-lines file; docs/batch.md has the formats."""

from moejax.serve.batch.job import Job, OpenJob, open_job

__all__ = ["Job", "OpenJob", "open_job"]
