"""The library's front door: load a checkpoint, generate text."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from host_offload.memory.device_memory import page_note
from host_offload.memory.store import StoreBuilder
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint, require_predictor
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.read_ahead import read_ahead
from moejax.checkpoints.versions import has_versions, with_versions
from moejax.engine.loop import Engine
from moejax.engine.snapshot import choices_of
from moejax.engine.statistics import (
    StartTimes,
    arena_stats,
    kv_stats,
    placement_stats,
    stream_stats,
    transfer_stats,
)
from moejax.errors import NotPinned, UserError, fallbacks, shown
from moejax.forks import let_children_end
from moejax.interrupt import deferred_interrupt
from moejax.models.config import ModelConfig, record_version
from moejax.models.hub import model_directory
from moejax.progress import byte_progress, count_progress
from moejax.requests.generation_config import describe_defaults, sampling_defaults
from moejax.requests.outputs import RequestOutput
from moejax.requests.prompts import PromptEncoder
from moejax.requests.request import GenerationRequest, Prompt
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.tokenizer import check_vocabulary, load_tokenizer
from moejax.serve.generation import (
    list_requests,
    require_owner,
    run_all,
    run_each,
    run_scores,
    run_stream,
)
from moejax.serve.kept_kv import KeptKV, require_writable
from moejax.start.auto import keep_drafts, keep_learned
from moejax.start.build import start_engine
from moejax.start.choices import Settings
from moejax.start.decide.drafter import (
    beside_drafter,
    choose_device,
    drafter_options,
    drafts_itself,
)
from moejax.start.decide.start_plan import name_products
from moejax.start.decide.store_choice import by_copies, store_builder
from moejax.start.decide.transfers import cache_of, reads_codes, stored_versions
from moejax.start.fields import with_keywords_of
from moejax.start.options import Config, Keywords
from moejax.start.precision import precision_stats
from moejax.start.report.explain import Explanation, explain, store_stats
from moejax.start.settings import settings_of
from moejax.start.whole_step import check_behind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("moejax")

T = TypeVar("T")


class LLM:
    """A Mixture-of-Experts model that runs from a fixed arena of expert slots and KV pages.

    - `model`: a checkpoint directory, a Hugging Face id, or "demo" for the model in the package.
    - The other keywords are the options of moejax.start.options. Sizes are bytes or text ("6GiB",
      for experts also "25%").

    Budgets, policies and the driver change no bit of the output. Use it as a context manager:
    leaving it frees arena, store and parameters. Raises UserError, BudgetError or ArenaTooSmall for
    what the caller can mend.
    """

    @with_keywords_of(Keywords, Config.of)
    def __init__(self, config: Config) -> None:
        self._begin(config)

    @classmethod
    def from_config(cls, config: Config) -> LLM:
        """Makes LLM(MODEL, KEYWORD=…) from options in one object."""
        llm = cls.__new__(cls)
        llm._begin(config)
        return llm

    def _begin(self, options: Config, predictor: bool = False) -> None:
        """Starts.

        - `predictor`: see load_checkpoint.
        """
        self._predictor = predictor
        self._start = StartTimes()
        # Everything that can be wrong without reading the weights is found before reading them.
        settings = settings_of(options)
        use_compilation_cache()
        self.options, self.model = options, str(options.model.model)
        self.device = choose_device(settings)
        let_children_end()
        if options.memory.kv_dir is not None:
            require_writable(options.memory.kv_dir)
        builder = store_builder(settings, self.device.platform)
        directory = model_directory(options.model.model)
        if options.memory.store.name == "memory":
            read_ahead(str(directory))
        settings = settings.of_model(record_version(directory))
        if drafts_itself(options):
            require_predictor(directory)
        sampling = sampling_defaults(directory, options.model.generation_config)
        self._sampling, self._notes = SamplingParams(**sampling), describe_defaults(sampling)
        self._start.end("backend")
        with ThreadPoolExecutor(1) as pool, ExitStack() as bars:
            words = directory if options.model.tokenizer is None else options.model.tokenizer
            tokenizer = pool.submit(load_tokenizer, words, options.model.tokenizer is not None)
            try:
                loaded = self._load(settings, directory, builder, bars)
            except NotPinned as error:
                bars.close()
                copies = by_copies(settings, self.device.platform)
                if copies is None:
                    raise
                fallbacks.warning(
                    "%s\nso driver host copies experts, from pageable memory as far as pinned is "
                    "full: the same bits, but slower; moejax doctor says what can be pinned",
                    error,
                )
                settings, builder = copies, store_builder(copies, self.device.platform)
                loaded = self._load(settings, directory, builder, bars)
            self._start.end("load", loaded.seconds)
            self._drafter: LLM | None = None
            try:
                self._drafter = _start_drafter(options)
                drafts = self._drafter and self._drafter.plan
                with beside_drafter(settings, drafts, self.device.platform) as (settings, notes):
                    self.engine, self.plan = start_engine(
                        loaded,
                        settings,
                        self.device,
                        tokenizer=lambda: check_vocabulary(
                            tokenizer.result(), loaded.config, words
                        ),
                        drafter=self._drafter and self._drafter.engine,
                    )
                self._notes = (*self._notes, *notes)
            except BaseException:
                if self._drafter is not None:
                    self._drafter.close()
                loaded.delete()
                raise
            self._start.end("engine")
        self._kept_kv = self._restore_kv()
        self.dtype, self._made, self._shared = loaded.dtype, loaded.quantizers, loaded.shared
        self._start.end("tokenizer")
        self._tracer = self.engine.tracer  # also while the engine runs without it
        longest = self.engine.scheduler.max_model_len
        self.encoder = PromptEncoder(self.engine.tokenizer, self.model, longest)
        self._closed = False
        self._borrower: threading.Thread | None = None
        self._lock, self._holder, self._process = threading.RLock(), "", os.getpid()
        log.info("%s: ops %s; %s", self.model, self.engine.runner.ops, self._start)
        log.info("%s: products %s", self.model, name_products(self.plan.steps))
        for note in self._notes:
            log.info("%s: %s", self.model, note)
        if (kernels := self.plan.kernels) is not None:
            if note := kernels.note():  # a user must see without a log why it is slow
                fallbacks.warning(note)
            check_behind(kernels, self.device)

    def _restore_kv(self) -> KeptKV | None:
        """Restores the KV of the option kv_dir, if it is given. Returns its place."""
        if self.options.memory.kv_dir is None:
            return None
        kept = KeptKV(self.options.memory.kv_dir, self.options, self.engine.runner.steps)
        try:
            if tokens := kept.restore(self.engine):
                self._notes = (*self._notes, f"kv_dir has KV of {tokens} tokens from before")
        except BaseException:
            self.engine.runner.delete()
            if self._drafter is not None:
                self._drafter.close()
            raise
        return kept

    def _load(
        self,
        settings: Settings,
        directory: str | os.PathLike[str],
        builder: Callable[..., StoreBuilder],
        bars: ExitStack,
    ) -> LoadedModel:
        """Loads the checkpoint's weights, in the versions of the precision. Experts may still be
        read when it returns.

        - `bars`: shows progress as long as it is open.
        """
        options = settings.options
        versions = stored_versions(settings, self.device.platform)
        report = bars.enter_context(byte_progress("loading", options.runtime.progress))
        loaded = load_checkpoint(
            directory,
            options.model.dtype,
            self.device,
            functools.partial(report, self.model),
            options.model.step,
            options.model.name_map,
            versions,
            in_files=options.memory.store.name == "file",
            verify_reads=options.memory.store.verify,
            cache=cache_of(settings, self.device.platform),
            new_builder=builder,
            shared=options.memory.store.name == "shared",
            coded=reads_codes(settings, self.device.platform),
            predictor=self._predictor,
            behind=options.runtime.speculative_config is None,  # whose model is loaded next
        )
        try:
            if made := not has_versions(loaded, versions):
                loaded.store.wait()
                bars.close()  # there is one at a time
            with byte_progress("making", made and options.runtime.progress) as report:
                return with_versions(
                    loaded,
                    versions,
                    quantizer=settings.precision.quantizer,
                    progress=report,
                    new_builder=builder,
                )
        except BaseException:  # its traceback may be kept, and with it the store
            loaded.delete()
            raise

    # ---- what users call

    @property
    def config(self) -> ModelConfig:
        return self.engine.runner.config

    @property
    def chosen(self) -> dict[str, Any]:
        """Options that decide bits, as this start chose them by what was verified on this machine.
        With them, another start has the same bits. Empty if nothing depended on that."""
        return {} if self.plan.kernels is None else {"ops": self.plan.steps.ops.chosen()}

    def get_tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer of transformers, None if the model has none."""
        return None if self.engine.tokenizer is None else self.engine.tokenizer.whole()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of requests that state none: those of the model's
        generation_config.json (option `generation_config`), and otherwise the defaults of
        SamplingParams. Change some with dataclasses.replace."""
        return self._sampling

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

        - `prompts`: a string, a list of token ids, `{"prompt": …}`, `{"prompt_token_ids": …}` or
          `{"messages": …}`, or a sequence of these.
        - `sampling_params`: one for all, or one for each prompt. None:
          `get_default_sampling_params()`, of which given ones take nothing.
        - `use_tqdm`: show a progress bar, unless the LLM was made with progress=False.
        - `session_id`: one for all, or one for each. Requests of one session are turns of a
          conversation: they run one after the other, and a turn's prompt is the whole conversation
          so far, of which only the new part is computed. The KV stays until `end_session`, on the
          device or, if room is needed, in host memory.
        - `priority`: one for all, or one for each; lower runs first, as in vLLM.

        Raises UserError, before anything runs, if one of the requests could never run, with its
        number; `generate_each` runs the others.
        """
        with deferred_interrupt() as interrupted, self._hold() as engine:
            params = self._sampling if sampling_params is None else sampling_params
            asked = list_requests(prompts, params, session_id, priority)
            statistics, total = engine.statistics, sum(one.sampling_params.n for one in asked)
            bar = self.options.runtime.progress and use_tqdm
            tokens = lambda: statistics.generated_tokens  # noqa: E731
            with count_progress("generating", total, 0, bar, tokens) as report:
                submissions = run_all(engine, self.encoder, asked, report, interrupted)
            return [submission.output(engine.tokenizer) for submission in submissions]

    def generate_each(
        self, requests: Iterable[GenerationRequest], *, max_in_flight: int | None = None
    ) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]:
        """Generates for a stream of requests of any length; yields each with its output in order
        of completion. Nothing of a finished request is kept.

        - `requests`: read only when the engine has room, so an iterable that waits makes the engine
          wait. A request that could never run is yielded with the UserError that `generate` would
          raise; what the iterable itself raises is raised.
        - `max_in_flight`: most requests in the engine at once. Default: twice the decode rows and
          one prefill step of short prompts.

        Closing the iterator early cancels the rest. Raises UserError for a max_in_flight below 1.
        """
        shapes = self._open().runner.shapes
        if max_in_flight is None:
            max_in_flight = 2 * shapes.rows + shapes.prefill_chunks
        if max_in_flight < 1:
            raise UserError(f"max_in_flight must be at least 1, got {max_in_flight}")
        tokenizer = self.engine.tokenizer
        return self._hold_each(
            run_each(self.engine, iter(requests), max_in_flight, self.encoder, tokenizer)
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, by all requests."""
        return self.engine.statistics.generated_tokens

    def end_session(self, session_id: str) -> None:
        """Ends a session and frees its KV. Raises UserError if the session does not exist or one of
        its turns is still running."""
        with self._hold() as engine:
            engine.end_session(session_id)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> Iterator[str]:
        """Generates for one prompt and yields its text piece by piece. Needs a tokenizer.

        `session_id` and `priority` are those of `generate`. Closing the iterator early cancels the
        request. Raises UserError as `generate` does, and for n > 1.
        """
        if self.engine.tokenizer is None:
            raise UserError(f"{self.model} has no tokenizer; use generate() with token ids")
        params = self._sampling if sampling_params is None else sampling_params
        asked = GenerationRequest(prompt, params, session_id, priority)
        if params.n > 1:
            raise UserError("stream() gives one sequence; use generate() for n > 1")
        encoded = self.encoder(prompt)
        with self._hold() as engine:
            engine.check(encoded[1], params, session_id=session_id)
        return self._hold_each(run_stream(engine, encoded, asked))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session_id: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates the answer to a conversation, or to each of several.

        - `messages`: a list of `{"role": …, "content": …}`, or a list of such lists. The
          tokenizer's chat template turns them into a prompt.
        - `chat_template`: another template, as Jinja text.
        - `add_generation_prompt`: end the prompt with the beginning of an answer.
        - `continue_final_message`: go on with the last message; needs add_generation_prompt=False.
        - `tools`: a list as in OpenAI's API, for the template.
        - `chat_template_kwargs`: values of names in the template, such as
          `{"enable_thinking": False}`.

        The other arguments are those of `generate`. Raises UserError if the model has no tokenizer
        or its tokenizer no chat template.
        """
        known = isinstance(messages, Sequence) and not isinstance(messages, str)
        # The first one decides for all, since there may be very many.
        first: Any = messages[0] if known and messages else {}
        if not known or isinstance(first, str) or not isinstance(first, Sequence | Mapping):
            raise UserError(
                f"messages are a list of messages or of conversations, not {shown(messages)}"
            )
        one = isinstance(first, Mapping)
        more = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts: Any = [{"messages": m, **more} for m in ([messages] if one else messages)]
        return self.generate(
            prompts, sampling_params, use_tqdm, session_id=session_id, priority=priority
        )

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probability of each token given the tokens before it, by prefill: float64[n − 1].

        - `token_ids`: n tokens, at least two.

        Raises UserError for fewer than two tokens, and as `generate` does.
        """
        return self.score_batch([token_ids])[0]

    def score_batch(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """`score` of each sequence; sequences share prefill steps."""
        try:
            most = self.engine.scheduler.max_model_len + 2  # tokens that need no look
            given = [[*map(operator.index, islice(ids, most))] for ids in sequences]
        except TypeError:
            raise UserError(f"scoring takes lists of token ids, got {shown(sequences)}") from None
        if any(len(ids) < 2 for ids in given):
            raise UserError("scoring needs at least two tokens a sequence")
        with self._hold() as engine:
            for ids in given:  # before anything runs
                engine.check(ids[:-1], SamplingParams(), ids[1:])
            most = 2 * engine.scheduler.prefill_chunks  # a step's, and those of the step before
            found = dict(chain.from_iterable(run_scores(engine, given, most)))
        return [found[place] for place in range(len(given))]

    def stats(self) -> dict[str, Any]:
        """What ran and what it cost, as plain data. Call it while no other thread runs requests.

        - `model`, `dtype`, `device`, `jax`: what was started, on which device and jax version.
        - `ops`: the implementation of each op: `cpu` (native), `pallas` or `xla`.
        - `products`: which are of integers, and of what numbers the exact ones are.
        - `driver`, `eviction`, `cache_aware_routing`: as chosen.
        - `precision`: versions of the experts, their quantizers, promotions and demotions.
        - `budget`: the split between experts and KV, and what `resize` moved.
        - `control`: decisions of the policies; null without policies.
        - `requests`, `prompt_tokens`, `generated_tokens`: totals.
        - `ttft_s`: seconds to the first token, waiting included: mean and max.
        - `tpot_s`: seconds per output token: mean, p50, p99.
        - `tokens_per_s`: generated tokens per second of steps.
        - `steps`: number of prefill and decode steps.
        - `speculation`: tokens that were drafted and accepted, decode steps with drafts, and by
          number of requests how long drafts are, how many tokens a step with them is expected to
          give a request, and how many times as long it takes; null without.
        - `experts`: `activations` (layer-experts that steps needed) = `hits` (resident) + `fills`
          (moved into a cell) + `read_through` (computed from the store); `hit_rate`.
        - `bytes`: moved over the link, by cause.
        - `arena`: bytes, slots by use, cells of each layer, KV pages and their peak.
        - `arena_owner`: `native ops` or `XLA`.
        - `kv`: prompt tokens found in earlier KV, preemptions, pages by use, by group of layers and
          of layers' states, swapped bytes, sessions.
        - `store`, `store_bytes`: where the experts are, and their bytes in memory, in files, and
          not yet read into memory.
        - `transfers`: the queue beside compute; null without one.
        - `placement`: what a second processor computed; null without one.
        - `stream`, `planner`: window and planner of `driver=stream`; null otherwise.
        - `experts_in_place`: experts that are read from the store and need no cell.
        - `pages`: whether host memory has huge pages.
        - `time`: seconds of the start by phase, of compilation, prefill and decode.
        - `trace_arrays`: optional arrays that steps return for a trace.
        - `notes`: every rounding and every cut of a budget; sampling defaults of the model.
        """
        with self._hold() as engine, engine.undisturbed():
            settings, runner, seconds = self.plan.settings, engine.runner, engine.statistics.seconds
            control = None if engine.control is None else engine.control.controller.stats()
            return {
                "model": self.model,
                "dtype": self.dtype,
                "device": self.device.device_kind,
                "eviction": settings.eviction,
                "precision": precision_stats(settings.precision, control, engine, self._made),
                "budget": {**settings.budget_stats(), **engine.resizer.stats()},
                "jax": jax.__version__,
                "ops": self.plan.ops_in_use(),
                "products": name_products(self.plan.steps),
                "driver": runner.driver,
                "trace_arrays": sorted(runner.steps.trace_arrays),
                "control": control,
                **engine.statistics.summary(),
                "speculation": None if engine.drafts is None else engine.drafts.stats(),
                "arena": arena_stats(engine.scheduler, runner.tables),
                "arena_owner": "native ops" if runner.steps.owned else "XLA",
                "kv": kv_stats(engine.scheduler),
                "store_bytes": runner.store.nbytes,
                "store": store_stats(engine, self.options),
                "transfers": transfer_stats(runner.transport.spec, runner.transport.totals()),
                "placement": placement_stats(
                    None if runner.processor is None else runner.processor.totals,
                    settings.placement,
                    runner.steps.second,
                ),
                "cache_aware_routing": runner.steps.cache_aware_routing,
                "stream": stream_stats(
                    runner.window,
                    engine.statistics,
                    runner.layout,
                    next(iter(self.plan.spec.link_bytes.values())),
                ),
                "planner": None if engine.planner is None else engine.planner.stats(),
                "experts_in_place": self.plan.budget.in_place,
                "pages": page_note(),
                "time": {
                    **self._start.report(),
                    "compile_s": runner.compiler.compile_s,
                    "prefill_s": seconds["prefill"],
                    "decode_s": seconds["decode"],
                    "total_s": self._start.total_s + sum(seconds.values()),
                },
                "notes": [*self.plan.budget.notes, *self._notes],
            }

    def explain(self) -> Explanation:
        """Returns how memory is divided now, as a table that adds up line by line, with notes.
        `print` shows it."""
        with self._hold() as engine, engine.undisturbed():
            found = explain(engine, self.plan.budget)
            chosen = choices_of(engine)
        return dataclasses.replace(found, notes=(*found.notes, *self._notes, *chosen))

    def close(self) -> None:
        """Completes the trace and frees arena, store and parameters. Idempotent. Raises UserError
        if the trace could not be written, and while the LLM is lent."""
        if self._closed or os.getpid() != self._process:
            return
        self._open()
        self._closed = True
        self.encoder.close()
        try:
            if self.engine.control is not None:
                self.engine.control.controller.finish()
                keep_learned(self.plan, self.engine.control.controller.stats())
            keep_drafts(self.plan, self.engine.drafts)
            if self._tracer is not None:
                self._tracer.close()
            if self._kept_kv is not None:
                self._kept_kv.save(self.engine)
        finally:
            self.engine.runner.delete()
            if self._drafter is not None:
                self._drafter.close()
            if self._shared is not None:
                self._shared.close()

    def lend(self, thread: threading.Thread | None) -> None:
        """Gives the engine to one thread, since several cannot share it: until `lend(None)` all
        others are refused. Raises UserError if it is lent already, runs requests or is closed."""
        if thread is not None and not self._open().idle:
            raise UserError("requests run in this LLM; let them end or close their iterators first")
        self._borrower = thread

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # ---- pieces

    @contextmanager
    def _hold(self) -> Iterator[Engine]:
        """Holds the engine for this thread alone. Raises UserError like _open, and while another
        thread has the engine: each would get the other's tokens."""
        engine = self._open()
        if not self._lock.acquire(blocking=False):
            raise UserError(
                f"{self._holder} runs requests in this LLM, which is for one thread at a time, and "
                f"{threading.current_thread().name} calls it too; use AsyncLLM, or one LLM a thread"
            )
        try:
            self._holder = threading.current_thread().name
            yield engine
        finally:
            self._lock.release()

    def _hold_each(self, results: Generator[T, None, None]) -> Iterator[T]:
        """Yields the results of a generator that runs the engine. The engine is held while the
        generator works, not while the caller uses a result."""
        try:
            while True:
                with self._hold():
                    result = next(results, None)
                if result is None:
                    return
                yield result
        finally:
            with self._lock:
                results.close()

    def _open(self) -> Engine:
        if self._closed:
            raise UserError("this LLM is closed; make another one")
        require_owner(self._process)
        if self._borrower not in (None, threading.current_thread()):
            raise UserError("this LLM belongs to an AsyncLLM; use that, or close it first")
        return self.engine


def _start_drafter(options: Config) -> LLM | None:
    """Starts the model that drafts, with the limits and on the device of the model that it drafts
    for; None if the options name none. Its cells and pages are its own. Also the checkpoint's own
    layer that predicts further tokens is a model of its own: it then has all that models have, for
    every device and kind of checkpoint, and shares no page, cell or count with the model."""
    if (own := drafter_options(options)) is None:
        return None
    drafter = LLM.__new__(LLM)
    drafter._begin(own, predictor=drafts_itself(options))
    try:
        drafter.engine.runner.store.wait()  # what is not there yet would count as free memory
    except BaseException:
        drafter.close()
        raise
    return drafter
