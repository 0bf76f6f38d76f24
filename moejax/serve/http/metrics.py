"""Metrics in Prometheus' format, under vLLM's names where it has them.

Source: https://docs.vllm.ai/en/latest/usage/metrics.html.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moejax.engine.loop import Engine
from moejax.requests.outputs import RequestOutput
from moejax.serve.llm import LLM

_OURS = "moejax"

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """Counters of one server. Those of the engine are read when they are asked for."""

    def __init__(self, llm: LLM, model: str):
        self._llm, self._label = llm, {"model_name": model}
        self._registry = CollectorRegistry()
        labels = [*self._label]

        def seconds(name: str, about: str) -> Histogram:
            made = Histogram(name, about, labels, buckets=_SECONDS, registry=self._registry)
            return made.labels(**self._label)

        self._first = seconds("vllm:time_to_first_token_seconds", "Time to the first token.")
        self._whole = seconds("vllm:e2e_request_latency_seconds", "Time of a whole request.")
        self._token = seconds(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's later tokens."
        )
        self._success = Counter(
            *("vllm:request_success", "Requests that ended.", [*labels, "finished_reason"]),
            registry=self._registry,
        )
        self._registry.register(self)

    def observe(self, began: float, output: RequestOutput) -> None:
        """Counts a request that ended.

        - `began`: when it came, by time.perf_counter.
        """
        now, times = time.perf_counter(), output.metrics
        first = now if times is None or times.first_token_s is None else times.first_token_s
        self._first.observe(first - began)
        self._whole.observe(now - began)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        if longest > 1:
            self._token.observe((now - first) / (longest - 1))
        for completion in output.outputs:
            self._success.labels(**self._label, finished_reason=completion.finish_reason).inc()

    def text(self) -> bytes:
        """Returns all metrics. Call it between two steps."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats, engine = self._llm.stats(), self._llm.engine
        experts, kv = stats["experts"], stats["kv"]
        names, values = [*self._label], [*self._label.values()]
        for name, about, value in _gauges(stats, engine):
            gauge = GaugeMetricFamily(name, about, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, about, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", stats["prompt_tokens"]),
            ("vllm:generation_tokens", "Generated tokens.", stats["generated_tokens"]),
            ("vllm:num_preemptions", "Preemptions.", kv["preemptions"]),
            ("vllm:prefix_cache_queries", "Tokens looked up.", stats["prompt_tokens"]),
            ("vllm:prefix_cache_hits", "Tokens found.", kv["prefix_hit_tokens"]),
            (f"{_OURS}:expert_activations", "Layer-experts needed.", experts["activations"]),
            (f"{_OURS}:expert_hits", "Of these, resident ones.", experts["hits"]),
        ):
            counter = CounterMetricFamily(name, about, labels=names)
            counter.add_metric(values, value)
            yield counter
        moved = CounterMetricFamily(
            f"{_OURS}:link_bytes", "Bytes moved over the link.", labels=[*names, "cause"]
        )
        for cause, count in stats["bytes"].items():
            moved.add_metric([*values, cause], count)
        yield moved

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _gauges(stats: dict[str, Any], engine: Engine) -> Iterator[tuple[str, str, float]]:
    scheduler, arena = engine.scheduler, stats["arena"]
    yield "vllm:num_requests_running", "Requests that run.", len(scheduler.running)
    yield "vllm:num_requests_waiting", "Requests that wait.", len(scheduler.waiting)
    used = 1 - scheduler.cache.available / max(arena["kv_pages"], 1)
    yield "vllm:kv_cache_usage_perc", "Share of KV pages in use, 1 = all.", used
    yield f"{_OURS}:expert_slots", "Slots of the arena that experts have.", arena["expert_slots"]
    yield f"{_OURS}:kv_slots", "Slots of the arena that KV has.", arena["kv_slots"]
    yield f"{_OURS}:slot_bytes", "Bytes of a slot.", arena["slot_bytes"]
