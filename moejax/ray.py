"""Ray Data: a model on a pool of Ray's actors as a stage of a pipeline.

    import ray
    import moejax.ray
    from moejax import SamplingParams

    dataset = ray.data.read_parquet("s3://bucket/prompts")
    results = moejax.ray.generate(dataset, "/models/Qwen3-30B-A3B", SamplingParams(max_tokens=64),
                                  workers=8, expert_budget="25%")
    results.write_parquet("s3://bucket/results")

Reading, writing, backpressure and autoscaling are Ray Data's: directories, Parquet, object stores.
What a whole job has beyond that, to go on after a kill and to have errors of its own for what ends
workers, is `moejax generate --ray` (docs/how-to/ray.md). Ray itself is imported when a function is
called: pip install 'moejax[ray]'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moejax.errors import UserError
from moejax.models.hub import model_directory
from moejax.requests.generation_config import sampling_defaults
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.batch.job import Job, list_given_fields
from moejax.serve.batch.lines import LINE_FIELDS, Line, read_lines
from moejax.serve.batch.result_lines import failure, read_result, success
from moejax.serve.cluster.fleet import Generator
from moejax.serve.cluster.ray_cluster import open_connection, require_ray
from moejax.serve.cluster.workers import Scale, worker_options
from moejax.serve.llm import LLM
from moejax.start.provenance import decided_by

if TYPE_CHECKING:
    from ray.data import Dataset

BATCH = 256
"""Rows that a worker is given at once."""


def generate(
    dataset: Dataset | Iterable[str | Mapping[str, Any]],
    model: str,
    sampling_params: SamplingParams | None = None,
    *,
    address: str = "auto",
    workers: int | None = None,
    cores_per_worker: int | None = None,
    batch_size: int = BATCH,
    seed: int = 0,
    **options: Any,
) -> Dataset:
    """The dataset with a model's answers, lazily, as Ray Data's own operations do.

    dataset: of rows with the fields of a file job's lines (docs/reference/file_jobs.md): `prompt`,
    `prompt_token_ids` or `messages`, and if wanted fields of SamplingParams and an `id`. Other
    columns are kept as they are. Or a list of prompts, or of such rows. sampling_params: of rows
    without fields of it (default: those of the model's generation_config.json). workers,
    cores_per_worker: as in `moejax generate`. address: of Ray, where this process is not connected
    to one. batch_size: rows that a worker is given at once. seed: a row without `seed` gets one
    that comes from it and from the row's `id`, or, without one, from all its fields: so rows that
    are equal in all fields get equal answers. options: of LLM.

    Columns that are added: `id` where there is none, `text`, `token_ids`, `finish_reason`,
    `prompt_tokens`, `completion_tokens`, `error` (null where there is none) and `result`, the line
    that a file job would write. What is wrong with a row is its error. No bit depends on the number
    of workers or on the batches.

    Raises UserError where Ray is not installed or not there, and for options that can never be.
    Turns of sessions need a file job, which keeps them on one worker.
    """
    ray = require_ray()
    scale = Scale(address, workers, cores_per_worker)
    open_connection(address, scale.cpus)  # for the process's life, as Ray Data's own
    asked = worker_options(Generator, model, options, scale)
    given = asked.arguments[1]
    params = sampling_params
    if params is None:
        choice = str(given.get("generation_config", "auto"))
        params = SamplingParams(**sampling_defaults(model_directory(model), choice))
    data: Any = dataset
    if not isinstance(data, ray.data.Dataset):
        rows = [{"prompt": row} if isinstance(row, str) else dict(row) for row in data]
        data = ray.data.from_items(rows)
    job = Job(
        "rows",
        "rows",
        model=model,
        dtype=str(given.get("dtype", "auto")),
        decided_by=decided_by(model, given),
        sampling=list_given_fields(params),
        seed=params.seed or seed,
    )
    return data.map_batches(
        Rows,
        fn_constructor_args=(job, given),
        compute=ray.data.ActorPoolStrategy(size=asked.count),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=asked.cpus,
        num_gpus=asked.gpus,
    )


class Rows:
    """What each actor of Ray Data has: an LLM, called with tables of rows."""

    def __init__(self, job: Job, options: Mapping[str, Any]):
        self._job = job
        self._llm = LLM(job.model, progress=False, **options)

    def __call__(self, table: Any) -> Any:
        """The table with columns for the results of its rows."""
        import pyarrow

        lines = list(_lines(table.to_pylist(), self._job))
        results: dict[int, bytes] = {}
        requests = []
        for place, line in enumerate(lines):
            if line.request is None:
                results[place] = failure(line, line.error or "")
            elif line.request.session_id is not None:
                results[place] = failure(line, "session_id needs a file job: moejax generate --ray")
            else:
                requests.append(dataclasses.replace(line.request, tag=place))
        for request, output in self._llm.generate_each(requests):
            place = request.tag
            assert isinstance(place, int)
            if isinstance(output, UserError):
                results[place] = failure(lines[place], str(output))
            else:
                results[place] = success(lines[place], output, self._job.model)
        found = [_columns(results[place]) for place in range(len(lines))]
        for field in _result_schema():
            if field.name == "id" and "id" in table.column_names:
                continue  # as it was given, also where it is a number
            if field.name in table.column_names:
                table = table.drop_columns([field.name])
            values = pyarrow.array([row[field.name] for row in found], field.type)
            table = table.append_column(field.name, values)
        return table


def _lines(rows: list[dict[str, Any]], job: Job) -> Iterator[Line]:
    """The rows as lines of a job, each for itself, so that no batch changes a line: its id is its
    own or what its fields say."""
    for row in rows:
        fields = {n: value for n, value in row.items() if n in LINE_FIELDS and value is not None}
        if "id" not in fields:
            text = json.dumps(fields, sort_keys=True, default=str)
            fields["id"] = f"row-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        raw = json.dumps(fields, ensure_ascii=False, default=str).encode()
        yield from read_lines([raw], sampling=job.sampling, seed=job.seed, made_with=job.made_with)


def _columns(raw: bytes) -> dict[str, Any]:
    """A result as columns: what most want of the first sequence by name, and all of it, as the line
    that a file of JSON lines has, as `result`."""
    id, _, failed = read_result(raw)
    record = json.loads(raw)
    body = record if "custom_id" not in record else record["response"]["body"]
    first = (body.get("outputs") or body.get("choices") or [body])[0]
    message = first.get("message")
    error = record["error"]
    usage = body.get("usage") or {}
    return {
        "id": str(id),
        "text": message["content"] if message else first.get("text"),
        "token_ids": first.get("token_ids"),
        "finish_reason": first.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error": error["message"] if failed else None,
        "result": raw.decode().rstrip("\n"),
    }


def _result_schema() -> Any:
    """The Arrow schema of `_columns`."""
    import pyarrow

    text, number = pyarrow.string(), pyarrow.int32()
    return pyarrow.schema(
        {
            "id": text,
            "text": text,
            "token_ids": pyarrow.list_(number),
            "finish_reason": text,
            "prompt_tokens": number,
            "completion_tokens": number,
            "error": text,
            "result": text,
        }
    )
