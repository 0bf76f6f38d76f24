"""Runs a model as a stage of a Ray Data pipeline, on a pool of Ray's actors.

    import ray
    import moejax.ray
    from moejax import SamplingParams

    dataset = ray.data.read_parquet("s3://bucket/prompts")
    results = moejax.ray.generate(dataset, "/models/Qwen3-30B-A3B", SamplingParams(max_tokens=64),
                                  workers=8, expert_budget="25%")
    results.write_parquet("s3://bucket/results")

Ray Data reads and writes directories, Parquet and object stores, and does backpressure and
autoscaling. `moejax generate --ray` (docs/how-to/ray.md) runs a whole job instead, which continues
after a kill and turns a request that ends workers into an error of that request. A function imports
Ray when it is called: pip install 'moejax[ray]'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
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
from moejax.serve.cluster.workers import OTHER_OPS, Scale, worker_options
from moejax.serve.llm import LLM
from moejax.start.provenance import decided_by

if TYPE_CHECKING:
    from ray.data import Dataset

BATCH = 256
"""Rows that a worker gets at once."""


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
    """Adds a model's answers to a dataset, lazily, as Ray Data's own operations do. No bit of an
    answer depends on the number of workers or on the batches; a worker that would run other ops
    than the first ends the pipeline.

    - `dataset`: rows with the fields of a file job's lines (docs/reference/file_jobs.md): `prompt`,
      `prompt_token_ids` or `messages`, and optionally fields of SamplingParams and an `id`. Other
      columns are kept. It may also be a list of prompts or of such rows.
    - `model`: a path, a Hub id, or "demo".
    - `sampling_params`: for rows without fields of their own (default: those of the model's
      generation_config.json).
    - `address`: of Ray, if this process is not connected to a cluster.
    - `workers`, `cores_per_worker`: as in `moejax generate`.
    - `batch_size`: rows that a worker gets at once.
    - `seed`: a row without `seed` gets one that is made from this seed and the row's `id`, or, if
      it has none, from all fields of the row. So rows that are equal in all fields get equal
      answers.
    - `options`: of LLM.

    Returns the dataset with these columns more: `id` if it has none, `text`, `token_ids`,
    `finish_reason`, `prompt_tokens`, `completion_tokens`, `error` (null for a good row) and
    `result`, the line that a file job would write. A mistake in a row is the row's error; so is a
    `session_id`, since sessions need a file job, which keeps their turns on one worker.

    Raises UserError where Ray is not installed or not running, and for impossible options.
    """
    ray = require_ray()
    scale = Scale(address, workers, cores_per_worker)
    open_connection(address, scale.cpus)  # stays open until the process ends, as Ray Data's own do
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
    # Restarted on another machine, it knows nothing, and the next worker is the first.
    first = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(FirstChoice).remote()
    return data.map_batches(
        Rows,
        fn_constructor_args=(job, given, first),
        compute=ray.data.ActorPoolStrategy(size=asked.count),
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=asked.cpus,
        num_gpus=asked.gpus,
    )


class FirstChoice:
    """An actor that keeps what the first worker of a pipeline chose."""

    def __init__(self) -> None:
        self._chosen: Mapping[str, Any] | None = None

    def is_chosen(self, chosen: Mapping[str, Any]) -> bool:
        """Whether a worker chose what the first one chose (LLM.chosen)."""
        self._chosen = chosen if self._chosen is None else self._chosen
        return chosen == self._chosen


class Rows:
    """The LLM of one Ray Data actor, which is called with tables of rows.

    - `first`: the handle of a FirstChoice.

    Raises UserError for ops that another worker did not choose.
    """

    def __init__(self, job: Job, options: Mapping[str, Any], first: Any):
        self._job = job
        self._llm = LLM(job.model, progress=False, **options)
        if not require_ray().get(first.is_chosen.remote(self._llm.chosen)):
            raise UserError(f"{socket.gethostname()} {OTHER_OPS}")

    def __call__(self, table: Any) -> Any:
        """Adds columns for the results of its rows to a table."""
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
    """Yields each row as a line of a job. A line depends only on its row, not on the batch: without
    an `id`, it gets a digest of the row's fields."""
    for row in rows:
        fields = {n: value for n, value in row.items() if n in LINE_FIELDS and value is not None}
        if "id" not in fields:
            text = json.dumps(fields, sort_keys=True, default=str)
            fields["id"] = f"row-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        raw = json.dumps(fields, ensure_ascii=False, default=str).encode()
        yield from read_lines([raw], sampling=job.sampling, seed=job.seed, made_with=job.made_with)


def _columns(raw: bytes) -> dict[str, Any]:
    """A result as columns: the main fields of its first sequence, and in `result` the whole line
    that a file job would write."""
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
