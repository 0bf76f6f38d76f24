"""The library's front door: load a checkpoint, generate text."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import Policy
from host_offload.control.rules import check_policies
from host_offload.memory.budget import Share
from host_offload.policies.eviction.names import with_eviction
from host_offload.policies.precision.names import Precision
from host_offload.policies.prefetch.names import with_prefetch
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.device import select_device
from moejax.engine.loop import Engine, Listener
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.models.directory import model_directory
from moejax.progress import loading_progress, token_progress
from moejax.requests.outputs import RequestOutput
from moejax.requests.prompts import EncodedPrompt, encode_prompt
from moejax.requests.request import GenerationRequest, Prompt
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.tokenizer import check_vocabulary, load_tokenizer
from moejax.serve.engine_stats import engine_stats
from moejax.serve.generation import (
    asked_for,
    check,
    in_engine,
    run_each,
    run_scores,
    run_stream,
    submit,
)
from moejax.sizes import parse_expert_budget, parse_size
from moejax.start.budget_options import parse_budget_options, start_budget
from moejax.start.build import Limits, check_driver, start_engine
from moejax.start.explain import Explanation, explain
from moejax.start.precision import parse_precision, precision_stats, trace_header, with_precision
from moejax.start.start_times import StartTimes
from moejax.traces.tracer import check_trace, trace_engine
from pallas_kernels import parse_ops

log = logging.getLogger("moejax")


class LLM:
    """A Mixture-of-Experts model that runs from a fixed arena of expert slots and KV pages.

    model: a Hugging Face or Orbax checkpoint directory, or "demo" for the model in the package
    ("./demo" is a directory). step, name_map: of an Orbax checkpoint that another program wrote,
    see load_checkpoint and docs/checkpoints.md.
    dtype: "auto" (the checkpoint's), "half", "float16", "bfloat16", "float", "float32".
    seed: of requests that bring none. max_model_len: prompt and generated tokens of a sequence
    (default: the model's). max_num_seqs: sequences decoded at once (16 on CPU, 64 on GPU).
    max_num_batched_tokens: prompt tokens of the largest prefill step (2048 on CPU, 8192 on GPU).

    memory, expert_budget, kv_budget: bytes (`6 * 2**30` or "6GiB") of the arena and its two parts;
    expert_budget also as a share of all experts ("25%"). Any two fix the third; without numbers all
    experts and the KV of max_num_seqs × max_model_len are held, both cut to what fits. The budget
    decides speed only: the output has the same bits. budget, resize, cells: where the line between
    the two is, whether it moves while requests run, what each layer gets (docs/memory.md).

    swap_space: most host memory for KV pages that make room, bytes or "4GiB". kv_overflow: "swap"
    moves them there; "recompute" drops them and computes them again by the prefill path, which
    changes bits (`RequestMetrics.recomputed` says of whom). enable_prefix_caching: prompts with
    equal beginnings share KV. long_prefill_token_threshold: most tokens of one prompt in a prefill
    step that others wait for (default: a quarter of max_num_batched_tokens).

    driver: "device" runs a step as one executable; "host" calls each layer's parts from Python,
    slower, for policies that look between them; no bit depends on it.
    eviction: which expert makes room, "lru" (default), "lfu", "lfru", "fifo" or "static", see
    host_offload.policies. policies: more of them, of your own (docs/write_a_policy.md); one that
    writes victim_weights takes the place of eviction. prefetch: NAME or NAME=PATH, which experts
    come ahead of need (docs/policies.md). No bit depends on any of them.
    precision, hi, lo, interval, hi_share, quantizer: which version experts are in, "int8", "int4",
    "int2" (which change bits), "lossless12", or a mix of two by "dynaexq", "map=FILE" or "random":
    docs/precision.md.
    ops: "auto", "xla", "pallas", or per op, "plan=xla,route=pallas" (pallas_kernels.resolve_ops).
    device: "cpu", "gpu" or a jax device (default: jax's first). progress: bars on stderr while
    loading and generating. cache_dir: XLA's compilation cache (default: jax's own setting if there
    is one, else ~/.cache/moejax/xla; "" for none). listener: see Engine. prefill_waves: passes over
    a layer's experts in a prefill step (default: 1 with XLA ops, 8 with kernels); no bit depends on
    it. trace: an empty or new directory to write a trace of every step into (docs/trace_format.md).
    trace_arrays: what else is in it, of "probs", "gate_input" and "embedding"; they are large.

    A context manager: leaving it frees arena, store and parameters. Raises UserError, BudgetError
    or ArenaTooSmall for what the caller can mend.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        step: int | str | None = None,
        name_map: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        memory: int | str | None = None,
        expert_budget: int | str | Share | None = None,
        kv_budget: int | str | None = None,
        budget: str = "fixed",
        resize: str = "none",
        cells: str | Sequence[int] = "uniform",
        eviction: str | None = None,
        prefetch: str | None = None,
        policies: Sequence[Policy] = (),
        precision: str | Precision | None = None,
        hi: str | None = None,
        lo: str | None = None,
        interval: str | None = None,
        hi_share: float | None = None,
        quantizer: str = "rtn",
        driver: str = "device",
        ops: str | Mapping[str, str] = "auto",
        device: str | jax.Device | None = None,
        progress: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_arrays: str | Sequence[str] = (),
        prefill_waves: int | None = None,
        swap_space: int | str = "4GiB",
        kv_overflow: str = "swap",
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int | None = None,
        listener: Listener | None = None,
    ):
        self._start = StartTimes()
        # Everything that can be wrong without reading the weights is found before reading them.
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory=None if memory is None else parse_size(memory),
            expert_budget=None if expert_budget is None else parse_expert_budget(expert_budget),
            kv_budget=None if kv_budget is None else parse_size(kv_budget),
            prefill_waves=prefill_waves,
            swap_space=parse_size(swap_space),
            kv_overflow=kv_overflow,
            enable_prefix_caching=enable_prefix_caching,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        check_driver(driver)
        self._budgets = parse_budget_options(budget, resize, cells, limits)
        mix: Any = dict(hi=hi, lo=lo, interval=interval, hi_share=hi_share, quantizer=quantizer)
        self.precision = parse_precision(precision, seed=seed, cells=(budget, cells), **mix)
        others = self._budgets.policies(self.precision)
        try:
            eviction, all_policies = with_eviction(eviction, with_prefetch(prefetch, policies))
            all_policies = *all_policies, *others
            check_policies(all_policies, driver)
            wanted_ops = parse_ops(ops)
        except ValueError as error:
            raise UserError(str(error)) from error
        arrays = check_trace(trace, trace_arrays)
        use_compilation_cache(cache_dir)
        self.model, self._progress, self._eviction = str(model), progress, eviction
        self.device = select_device(device)
        directory = model_directory(model)
        self._start.end("backend")
        with ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(load_tokenizer, directory)
            with loading_progress(self.model, progress) as report:
                versions = self.precision.versions
                loaded = load_checkpoint(
                    directory, dtype, self.device, report, step, name_map, versions
                )
            loaded = with_precision(loaded, self.precision, quantizer, progress)
            self._start.end("load", loaded.seconds)
            try:
                self.engine, self.budget = start_engine(
                    loaded,
                    limits,
                    policies=all_policies,
                    precision=self.precision,
                    driver=driver,
                    trace_arrays=arrays,
                    ops=wanted_ops,
                    device=self.device,
                    seed=seed,
                    listener=listener,
                )
            except BaseException:
                loaded.store.delete()
                raise
            self._start.end("engine")
            try:
                self._tokenizer = check_vocabulary(tokenizer.result(), self.config, directory)
                self.engine.tokenizer = self._tokenizer
                self.budget = start_budget(self.engine, self._budgets, self.budget)
                self._tracer = trace_engine(
                    self.engine,
                    trace,
                    dtype=loaded.dtype,
                    seed=seed,
                    settings={
                        "model": self.model,
                        "eviction": eviction,
                        "prefetch": prefetch,
                        "precision": trace_header(self.precision, self.engine.runner),
                        "driver": driver,
                        "budgets": self._budgets.stats(),
                    },
                    arrays=arrays,
                )
            except BaseException:
                self.engine.runner.delete()
                raise
        self.dtype, self._made = loaded.dtype, loaded.quantizers
        self._start.end("tokenizer")
        self._closed = False
        self._borrower: threading.Thread | None = None
        log.info("%s: ops %s; %s", self.model, self.engine.runner.ops, self._start)

    # ---- what users call

    @property
    def config(self) -> ModelConfig:
        return self.engine.runner.config

    def get_tokenizer(self):
        """The tokenizer (transformers' PreTrainedTokenizerFast), None if the model has none."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        session_id: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts; returns their outputs in the order of the prompts.

        prompts: a string, a list of token ids, {"prompt": …}, {"prompt_token_ids": …} or
        {"messages": …}, or a sequence of these. sampling_params: one for all or one each. use_tqdm
        (vLLM's name): show a progress bar, unless the LLM was made with progress=False.

        session_id: one for all or one each. Requests of one session are turns of a conversation and
        run one after the other; a turn's prompt is all of the conversation so far, and what it has
        in common with the turn before is not computed again. Its KV stays until `end_session`, on
        the device or, when room is needed, in host memory. priority: one for all or one each; lower
        runs first (as in vLLM).

        Raises UserError, before anything runs, if one of the requests could never run.
        """
        asked = asked_for(self._encode, prompts, sampling_params, session_id, priority)
        for prompt, wanted, session, _ in asked:
            check(self._open(), prompt, wanted, session)
        with in_engine(self._open()) as submissions:
            submissions += [submit(self.engine, *one) for one in asked]
            requests = [r for s in submissions for r in s.requests]
            shown, ended, statistics = self._progress and use_tqdm, 0, self.engine.statistics
            with token_progress(
                "generating", len(requests), 0, lambda: statistics.generated_tokens, shown
            ) as report:
                while not all(s.finished for s in submissions):
                    touched = self.engine.step()
                    ended += sum(r.finish_reason is not None for r in touched)
                    report(ended)
            return [submission.output(self._tokenizer) for submission in submissions]

    def generate_each(
        self, requests: Iterable[GenerationRequest], *, max_in_flight: int | None = None
    ) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]:
        """Generates for a stream of requests of any length, yielding each with its output in order
        of completion. Nothing of a finished request is kept.

        requests: pulled from only when the engine has room, so an iterable that waits makes the
        engine wait. max_in_flight: most requests in the engine at once (default: twice the decode
        rows and one prefill step of short prompts). A request that could never run is yielded with
        the UserError that `generate` would raise, and the others go on; what the iterable itself
        raises is raised. Closing the iterator early cancels what is left.

        Raises UserError for a max_in_flight below 1.
        """
        shapes = self._open().runner.shapes
        if max_in_flight is None:
            max_in_flight = 2 * shapes.rows + shapes.prefill_chunks
        if max_in_flight < 1:
            raise UserError(f"max_in_flight must be at least 1, got {max_in_flight}")
        return run_each(self._open, iter(requests), max_in_flight, self._encode, self._tokenizer)

    def end_session(self, session_id: str) -> None:
        """Forgets a session and frees its KV. Raises UserError for a session that does not exist or
        has a turn that has not ended."""
        self._open().scheduler.sessions.end(session_id)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> Iterator[str]:
        """Generates for one prompt, yielding its text piece by piece. Needs a tokenizer.

        session_id, priority: as of generate. Closing the iterator early cancels the request. Raises
        UserError as generate does, and for n > 1.
        """
        if self._tokenizer is None:
            raise UserError(f"{self.model} has no tokenizer; use generate() with token ids")
        encoded, params = self._encode(prompt), sampling_params or SamplingParams()
        if params.n > 1:
            raise UserError("a stream is of one sequence; use generate() for n > 1")
        check(self._open(), encoded, params, session_id)
        return run_stream(self._open, encoded, params, session_id, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        session_id: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates the answer to a conversation, or to each of several, written out by the
        tokenizer's chat template. The rest as in generate.

        Raises UserError when the model has no tokenizer or its tokenizer no chat template.
        """
        one = not messages or isinstance(messages[0], Mapping)
        prompts: Any = [{"messages": m} for m in ([messages] if one else messages)]
        return self.generate(
            prompts, sampling_params, use_tqdm, session_id=session_id, priority=priority
        )

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """log p(token_ids[i + 1] | token_ids[: i + 1]) for every i, float64[n − 1], by prefill.

        Raises UserError for fewer than two tokens and as generate does.
        """
        return self.score_batch([token_ids])[0]

    def score_batch(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """score of each sequence, batched by prefill steps."""
        if any(len(ids) < 2 for ids in sequences):
            raise UserError("scoring needs at least two tokens a sequence")
        return run_scores(self._open(), sequences)

    def stats(self) -> dict[str, Any]:
        """What ran and what it cost, as plain data; the command line's --json prints it."""
        ran = engine_stats(self._open(), self._start)
        options = {
            "eviction": self._eviction,
            "precision": precision_stats(self.precision, ran["control"], self.engine, self._made),
            "budget": {**self._budgets.stats(), **self.engine.resizer.stats()},
        }
        names = {"model": self.model, "dtype": self.dtype, "device": self.device.device_kind}
        return {**names, **options, **ran, "notes": list(self.budget.notes)}

    def explain(self) -> Explanation:
        """How memory is divided now, as a table that adds up line by line: `print` it."""
        return explain(self._open(), self.budget)

    def close(self) -> None:
        """Completes the trace and frees arena, store and parameters. Idempotent. Raises UserError
        where the trace could not be written, and while the LLM is lent."""
        if self._closed:
            return
        self._open()
        self._closed = True
        try:
            if self.engine.control is not None:
                self.engine.control.finish()
            if self._tracer is not None:
                self._tracer.close()
        finally:
            self.engine.runner.delete()

    def lend(self, thread: threading.Thread | None) -> None:
        """Gives the engine, which is not for several threads, to one of them: until `lend(None)`
        all others are refused. Raises UserError when it is lent already, runs requests or is
        closed."""
        if thread is not None and not self._open().idle:
            raise UserError("requests run in this LLM; let them end or close their iterators first")
        self._borrower = thread

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # ---- pieces

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        return encode_prompt(prompt, self._tokenizer, self.model)

    def _open(self) -> Engine:
        if self._closed:
            raise UserError("this LLM is closed; make another one")
        if self._borrower not in (None, threading.current_thread()):
            raise UserError("this LLM belongs to an AsyncLLM; use that, or close it first")
        return self.engine
