"""The library's front door: load a checkpoint, generate text."""

from __future__ import annotations

import dataclasses
import importlib.resources
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from host_offload.arena import SlotClass
from host_offload.budget import Share
from host_offload.eviction import victim_weights
from moejax.checkpoint import load_checkpoint
from moejax.device import select_device
from moejax.engine import Engine, Listener
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.outputs import RequestOutput, request_output
from moejax.progress import generation_progress, loading_progress
from moejax.sampling_params import SamplingParams
from moejax.scheduler import Request
from moejax.sizes import parse_expert_budget, parse_size
from moejax.startup import Limits, start_engine, use_compilation_cache
from moejax.tokenizer import Detokenizer, load_tokenizer
from pallas_kernels import parse_ops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("moejax")

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A Mixture-of-Experts model that runs from a fixed arena of expert slots and KV pages.

    model: a Hugging Face checkpoint directory, or "demo" for the model in the package ("./demo" is
    a directory).
    dtype: "auto" (the checkpoint's), "half", "float16", "bfloat16", "float", "float32".
    seed: of requests that bring none. max_model_len: prompt and generated tokens of a sequence
    (default: the model's). max_num_seqs: sequences decoded at once (16 on CPU, 64 on GPU).
    max_num_batched_tokens: prompt tokens of the largest sweep (2048 on CPU, 8192 on GPU).

    memory, expert_budget, kv_budget: bytes (`6 * 2**30` or "6GiB") of the arena and its two parts;
    expert_budget also as a share of all experts ("25%"). Any two fix the third; without numbers all
    experts and the KV of max_num_seqs × max_model_len are held, both cut to what fits. The budget
    decides speed only: the output has the same bits.

    eviction: "lru" or "lfu". ops: "auto", "xla", "pallas", or per op, "plan=xla,route=pallas": see
    pallas_kernels.resolve_ops.
    device: "cpu", "gpu" or a jax device (default: jax's first). progress: bars on stderr while
    loading and generating. cache_dir: XLA's compilation cache (default: jax's own setting if there
    is one, else ~/.cache/moejax/xla; "" for none). listener: see Engine. prefill_waves: passes over
    a layer's experts in a sweep (default: 1 with XLA ops, 8 with kernels); no bit depends on it.

    A context manager: leaving it frees arena, store and parameters. Raises UserError, BudgetError
    or ArenaTooSmall for what the caller can mend.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        memory: int | str | None = None,
        expert_budget: int | str | Share | None = None,
        kv_budget: int | str | None = None,
        eviction: str = "lru",
        ops: str | Mapping[str, str] = "auto",
        device: str | jax.Device | None = None,
        progress: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        prefill_waves: int | None = None,
        listener: Listener | None = None,
    ):
        began = time.perf_counter()
        # Everything that can be wrong without reading the weights is found before reading them.
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory=None if memory is None else parse_size(memory),
            expert_budget=None if expert_budget is None else parse_expert_budget(expert_budget),
            kv_budget=None if kv_budget is None else parse_size(kv_budget),
            prefill_waves=prefill_waves,
        )
        try:
            victim_weights(eviction)
            wanted_ops = parse_ops(ops)
        except ValueError as error:
            raise UserError(str(error)) from error
        use_compilation_cache(cache_dir)
        self.model, self._progress, self._eviction = str(model), progress, eviction
        self.device = select_device(device)
        directory = _directory(model)

        with ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(load_tokenizer, directory)
            with loading_progress(self.model, progress) as report:
                loaded = load_checkpoint(
                    directory, dtype=dtype, device=self.device, progress=report
                )
            self._load_s = time.perf_counter() - began
            try:
                self.engine, self.budget = start_engine(
                    loaded,
                    limits,
                    eviction=eviction,
                    ops=wanted_ops,
                    device=self.device,
                    seed=seed,
                    listener=listener,
                )
            except BaseException:
                loaded.store.delete()
                raise
            try:
                self._tokenizer = tokenizer.result()
            except BaseException:
                self.engine.runner.delete()
                raise
        self.dtype = loaded.dtype
        self._start_s = time.perf_counter() - began
        self._closed = False
        for note in self.budget.notes:
            # What the user asked for and does not get must be seen without asking for a log.
            log.log(logging.WARNING if ", cut from" in note else logging.INFO, note)
        log.info("%s: ops %s", self.model, self.engine.runner.ops)

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
    ) -> list[RequestOutput]:
        """Generates for all prompts; returns their outputs in the order of the prompts.

        prompts: a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}, or a
        sequence of these. sampling_params: one for all or one each. use_tqdm (vLLM's name): show a
        progress bar, unless the LLM was made with progress=False.

        Raises UserError, before anything runs, if one of the requests could never run.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        params = self._params_for(sampling_params, len(encoded))
        with self._requests(encoded, params) as requests:
            total = sum(p.max_tokens for p in params)
            with generation_progress(len(requests), total, self._progress and use_tqdm) as report:
                while any(r.finish_reason is None for r in requests):
                    touched = self.engine.step()
                    report(self.engine.statistics.generated_tokens, touched)
            return [
                request_output(request, text, self._tokenizer)
                for request, (text, _) in zip(requests, encoded, strict=True)
            ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Generates for one prompt, yielding its text piece by piece. Needs a tokenizer.

        Closing the iterator early cancels the request. Raises UserError as generate does.
        """
        if self._tokenizer is None:
            raise UserError(f"{self.model} has no tokenizer; use generate() with token ids")
        encoded, params = self._encode(prompt), self._params_for(sampling_params, 1)
        self._open().check(encoded[1], params[0])
        return self._stream(self._tokenizer, encoded, params)

    def _stream(
        self,
        tokenizer: PreTrainedTokenizerFast,
        encoded: tuple[str | None, list[int]],
        params: list[SamplingParams],
    ) -> Iterator[str]:
        with self._requests([encoded], params) as (request,):
            detokenizer, seen = Detokenizer(tokenizer, request.prompt), 0
            while request.finish_reason is None:
                self.engine.step()
                piece = detokenizer.push(request.output[seen:])
                seen = len(request.output)
                if piece:
                    yield piece
            if tail := detokenizer.finish():
                yield tail

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates the answer to a conversation, written out by the tokenizer's chat template.

        Raises UserError when the model has no tokenizer or its tokenizer no chat template.
        """
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise UserError(
                f"{self.model} has no chat template; use generate() with a prompt, or add a "
                "chat_template to its tokenizer_config.json"
            )
        conversation: Any = [dict(message) for message in messages]
        ids: Any = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return self.generate({"prompt_token_ids": ids}, sampling_params, use_tqdm)

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """log p(token_ids[i + 1] | token_ids[: i + 1]) for every i, float64[n − 1], by prefill.

        Raises UserError for fewer than two tokens and as generate does.
        """
        return self.score_batch([token_ids])[0]

    def score_batch(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """score of each sequence, batched by sweeps."""
        if any(len(ids) < 2 for ids in sequences):
            raise UserError("scoring needs at least two tokens a sequence")
        inputs = [(None, list(ids[:-1])) for ids in sequences]
        targets = [list(ids[1:]) for ids in sequences]
        params = [SamplingParams()] * len(inputs)
        with self._requests(inputs, params, targets) as requests:
            while any(r.finish_reason is None for r in requests):
                self.engine.step()
            return [np.asarray(request.scores) for request in requests]

    def stats(self) -> dict[str, Any]:
        """What ran and what it cost, as plain data; the command line's --json prints it."""
        engine = self._open()
        arena, layout = engine.scheduler.arena, engine.scheduler.arena.layout
        times, summary = engine.statistics.seconds, engine.statistics.summary()
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device.device_kind,
            "jax": jax.__version__,
            "ops": dataclasses.asdict(engine.runner.ops),
            "eviction": self._eviction,
            **summary,
            "arena": {
                "bytes": arena.slots * layout.slot_bytes,
                "slots": arena.slots,
                "slot_bytes": layout.slot_bytes,
                "expert_slots": arena.count(SlotClass.EXPERT),
                "kv_slots": arena.count(SlotClass.KV),
                "free_slots": arena.count(SlotClass.FREE),
                "cells_per_layer": np.sum(arena.cell_row >= 0, axis=1).tolist(),
                "cells_used": int(np.sum(np.asarray(engine.runner.tables.owner) >= 0)),
                "block_size": layout.page.block_size,
                "kv_pages": arena.pages,
                "kv_pages_used_peak": engine.scheduler.peak_pages,
            },
            "store_bytes": engine.runner.store.nbytes,
            "time": {
                "load_s": self._load_s,
                "compile_s": engine.runner.compile_s,
                "start_s": self._start_s,
                "prefill_s": times["prefill"],
                "decode_s": times["decode"],
                "total_s": self._start_s + sum(times.values()),
            },
            "notes": list(self.budget.notes),
        }

    def close(self) -> None:
        """Frees arena, store and parameters. Idempotent."""
        if not self._closed:
            self.engine.runner.delete()
            self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # ---- pieces

    def _params_for(self, given, count: int) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams()
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(params) != count:
            raise UserError(
                f"{count} prompts but {len(params)} sampling_params; give one or {count}"
            )
        return params

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of one prompt."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), [int(t) for t in prompt["prompt_token_ids"]]
            if "prompt" not in prompt:
                raise UserError("a prompt given as a dict needs 'prompt' or 'prompt_token_ids'")
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, [int(token) for token in prompt]
        if self._tokenizer is None:
            raise UserError(f"{self.model} has no tokenizer; give token ids instead of text")
        return prompt, self._tokenizer(prompt)["input_ids"]

    def _requests(self, encoded, params, targets=None):
        return _Requests(self._open(), encoded, params, targets)

    def _open(self) -> Engine:
        if self._closed:
            raise UserError("this LLM is closed; make another one")
        return self.engine


class _Requests:
    """Requests in the engine for as long as the context lasts: none is left behind by an error, an
    interrupt or a caller who stops listening."""

    def __init__(self, engine: Engine, encoded, params, targets):
        self.engine, self.added = engine, []
        try:
            for i, ((_, ids), each) in enumerate(zip(encoded, params, strict=True)):
                self.added.append(engine.add(ids, each, targets[i] if targets else None))
        except BaseException:
            engine.abort(self.added)
            raise

    def __enter__(self) -> list[Request]:
        return self.added

    def __exit__(self, *exception) -> None:
        self.engine.abort(self.added)
        self.engine.drain()


def _as_list(prompts: Any) -> list[Prompt]:
    single = isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and all(isinstance(p, int | np.integer) for p in prompts)
    )
    return [prompts] if single else list(prompts)


def _directory(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if model == "demo":
        return Path(str(importlib.resources.files("moejax") / "demo"))
    return model
