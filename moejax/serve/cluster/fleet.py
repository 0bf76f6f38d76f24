"""LLM.generate_each on the workers of a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from host_offload.memory.budget import format_bytes
from moejax.errors import UserError
from moejax.requests.outputs import RequestOutput
from moejax.requests.request import GenerationRequest
from moejax.serve.cluster.pool import Pool, Task, WorkerOptions
from moejax.serve.cluster.ray_cluster import LOCAL, Node, nodes, own_cpus
from moejax.serve.cluster.worker import Generator, Worker
from moejax.start.options import Config, refuse_cache_aware

TOKEN_COST = 8.0
"""What a generated token costs, in prompt tokens: it is a step of its own, shared with the rows
beside it. Only the order depends on it."""

CHARACTERS = 4
"""Characters of a token, roughly."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How a model is spread. address: of Ray. workers, cores_per_worker: None: as `worker_options`
    says."""

    address: str = LOCAL
    workers: int | None = None
    cores_per_worker: int | None = None

    def __post_init__(self):
        for name in ("workers", "cores_per_worker"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")

    @property
    def cpus(self) -> int:
        """CPUs of a Ray of one's own: what its workers ask for, so that more of them than there are
        cores are possible."""
        cores = self.cores_per_worker
        return max(own_cpus(), (self.workers or 1) * (cores or 1))


def worker_options(
    kind: type[Worker], model: str, options: Mapping[str, Any], scale: Scale
) -> WorkerOptions:
    """What the workers of a connected cluster are: one a GPU with what its node has of CPUs for
    each, or, where there are no GPUs or the device is "cpu", one a node with all its CPUs, which
    are shared where several are asked for. Raises UserError where no node has room for one, and for
    options that can never be."""
    delta = Config.of(model, **options).policy.cache_aware_routing
    refuse_cache_aware(delta, "workers that share a job out must give the results of one")
    alive, given = nodes(), dict(options)
    on_gpu = any(node.gpus >= 1 for node in alive) and given.get("device") != "cpu"
    useful = [node for node in alive if node.gpus >= 1] if on_gpu else alive
    default = sum(int(node.gpus) for node in useful) if on_gpu else len(useful)
    count = scale.workers or max(default, 1)
    cores = scale.cores_per_worker or _cores(useful, count, on_gpu)
    if all(node.cpus < cores for node in useful):
        most = max((int(node.cpus) for node in useful), default=0)
        raise UserError(
            f"a worker asks for {cores} cores, and no node of the cluster has more than {most}; "
            "give fewer as --cores-per-worker"
        )
    if not on_gpu:
        given.setdefault("threads", cores)
    return WorkerOptions(kind, model, given, count, cores, 1.0 if on_gpu else 0.0)


def _cores(useful: list[Node], count: int, on_gpu: bool) -> int:
    """CPUs of a worker where nobody said."""
    if on_gpu:
        return max(int(min(node.cpus / node.gpus for node in useful)), 1)
    a_node = -(-count // max(len(useful), 1))
    return max(int(min((node.cpus for node in useful), default=1) / a_node), 1)


class Fleet:
    """An LLM on every worker of a connected cluster, for requests in any number; a context manager,
    which ends the workers. Arguments as of worker_options; warn as of Pool.

    A request's output has the bits that one LLM with these options gives it, whoever its worker is,
    and however many there are: contract 1.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        scale: Scale,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._pool = Pool(worker_options(Generator, model, options, scale), warn)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()

    @property
    def generated_tokens(self) -> int:
        """Tokens of all workers."""
        return self._pool.tokens

    def generate_each(
        self, requests: Iterable[GenerationRequest]
    ) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]:
        """`LLM.generate_each`; requests of one session run on one worker. A request that ends a
        worker, and then alone another one, is yielded with a UserError."""
        for task, output in self._pool.run(map(_task, requests)):
            assert isinstance(task.tag, GenerationRequest)
            yield task.tag, output

    def end_session(self, session_id: str) -> None:
        """`LLM.end_session`."""
        self._pool.end_group(session_id)

    def stats(self) -> dict[str, Any]:
        """What the workers say of themselves, and their sums (`merged`)."""
        return merged(self._pool.stats(), self._pool.ended)


def _task(asked: GenerationRequest) -> Task:
    # The tag is the caller's and stays here.
    sent = dataclasses.replace(asked, tag=None)
    return Task(sent, _cost(asked), asked.session_id, tag=asked)


def _cost(asked: GenerationRequest) -> float:
    """Roughly, in prompt tokens. What runs earlier by its priority costs more than all others."""
    prompt, params = asked.prompt, asked.sampling_params
    if isinstance(prompt, Mapping):
        prompt = str(prompt)
    tokens = len(prompt) / (CHARACTERS if isinstance(prompt, str) else 1)
    return -asked.priority * 1e12 + tokens + TOKEN_COST * params.max_tokens * params.n


def merged(workers: list[dict[str, Any]], ended: int) -> dict[str, Any]:
    """Sums over workers, and a row for each. workers: as Pool.stats. ended: workers that ended
    before their time, whose counts are lost.

    tokens_per_s is the sum of what each generated a second of its own steps. A straggler is a
    worker with less than 70% of the median rate.
    """
    rows = []
    for worker in workers:
        stats = worker["stats"]
        experts, moved = stats["experts"], stats["bytes"]
        busy = stats["time"]["prefill_s"] + stats["time"]["decode_s"]
        rows.append(
            {name: worker[name] for name in ("worker", "host", "node", "pid", "results", "start_s")}
            | {
                "generated_tokens": stats["generated_tokens"],
                "prompt_tokens": stats["prompt_tokens"],
                "busy_share": busy / max(worker["ready_s"], 1e-9),
                "tokens_per_s": stats["generated_tokens"] / busy if busy else None,
                "activations": experts["activations"],
                "misses": experts["fills"] + experts["read_through"],
                "hit_rate": experts["hit_rate"],
                "moved_bytes": moved["fill"] + moved["read_through"],
                "store_bytes": stats["store_bytes"],
                "store": stats["store"]["kind"],
            }
        )
    rates = sorted(row["tokens_per_s"] for row in rows if row["tokens_per_s"])
    median = rates[len(rates) // 2] if rates else None
    for row in rows:
        rate = row["tokens_per_s"]
        row["straggler"] = bool(median and rate and rate < 0.7 * median)
    needed = sum(row["activations"] for row in rows)
    return {
        "workers": rows,
        "ended_workers": ended,
        **{n: sum(row[n] for row in rows) for n in _SUMS},
        "tokens_per_s": sum(rates) if rates else None,
        "hit_rate": 1 - sum(row["misses"] for row in rows) / needed if needed else None,
    }


_SUMS = ("results", "generated_tokens", "prompt_tokens", "misses", "moved_bytes")


def format_fleet(stats: Mapping[str, Any]) -> str:
    """The dict of `Fleet.stats` as aligned lines: a row for each worker, then all together."""
    lines = [
        f"{'worker':<8}{'results':>9}{'tokens/s':>10}{'busy':>7}{'hits':>7}{'moved':>11}"
        f"{'start':>9}  host"
    ]
    for row in stats["workers"]:
        rate = "–" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        hits = "–" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
        slow = "  straggler" if row["straggler"] else ""
        lines.append(
            f"{row['worker']:<8}{row['results']:>9}{rate:>10}{row['busy_share']:>7.0%}{hits:>7}"
            f"{format_bytes(row['moved_bytes']):>11}{row['start_s']:>7.2f} s  {row['host']}{slow}"
        )
    together = "–" if stats["tokens_per_s"] is None else f"{stats['tokens_per_s']:.1f}"
    ended = f", {stats['ended_workers']} ended before" if stats["ended_workers"] else ""
    lines.append(
        f"all: {stats['results']} results of {len(stats['workers'])} workers{ended}; "
        f"{stats['generated_tokens']} tokens, {together} tokens/s, "
        f"{format_bytes(stats['moved_bytes'])} moved"
    )
    return "\n".join(lines)
