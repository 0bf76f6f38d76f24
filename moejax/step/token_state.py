"""The current tokens of all rows, and the programs from logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moejax.step.compiler import Compiler, is_ready
from moejax.step.programs import Kind, ProgramKey, StepKeys
from moejax.step.step_parts import StepOutput, StepSpec, sums_in_one_order
from pallas_kernels.sample import truncates_any


class TokenState:
    """Holds current tokens, results of the latest step, and counts for penalties, on the device."""

    def __init__(
        self,
        steps: StepSpec,
        compiler: Compiler,
        keys: StepKeys,
        sharding: jax.sharding.Sharding,
    ):
        self._steps, self._compiler, self._keys = steps, compiler, keys
        self._sharding = sharding
        self._by_row = sums_in_one_order(steps.ops) or steps.ops.sample == "cpu"
        self._greedy: tuple[jax.Array, jax.Array] | None = None
        """(logits, tokens after its own greedy choice) of the step dispatched last; None once its
        tokens are chosen."""
        self._on_host = all(device.platform == "cpu" for device in sharding.device_set)
        self.tokens: jax.Array | np.ndarray
        self.tokens = jax.device_put(np.zeros(steps.shapes.rows, np.int32), sharding)
        """int32[R], the current token of each row."""
        self.results: jax.Array | None = None
        """StepOutput.results of the step dispatched last, with the tokens that were chosen."""
        self.counts: jax.Array | None = None
        """int32[R, V], the counts of sampler.adjust, from the first request with penalties on."""

    @property
    def choices(self) -> tuple[Kind, ...]:
        """The programs that sample tokens; steps make the greedy choice themselves."""
        return ("sample",) if self._by_row else ("sample_all", "sample")

    def follow(self, output: StepOutput) -> StepOutput:
        """Takes logits and results of a step that was dispatched. Returns the step's output."""
        self._greedy, self.results = (output.logits, output.tokens), output.results
        return output

    def sample(self, logits: jax.Array, update: np.ndarray, params: Sequence | None) -> jax.Array:
        """Samples rows, and writes the tokens to the current tokens and to `results`.

        - `logits`: float32[rows, V], of the latest step.
        - `update`: bool[R], the rows to sample; the latest step computed logits of them.
        - `params`: sampler.sample's arrays after the logits; None for the greedy choice, which the
          step has made already if `logits` is its own array.
        """
        made, self._greedy = self._greedy, None
        if params is None and made is not None and made[0] is logits:
            self.tokens = tokens = made[1]
            return tokens
        key = ProgramKey(self._choice(params), self._keys.bucket(logits.shape[0]))
        args = logits, self.tokens, update, self.results, *(params or ())
        tokens, self.results = self._compiler.call(key, *args)
        self.tokens = tokens
        return tokens

    def _choice(self, params: Sequence | None) -> Kind:
        """Returns the cheapest program that makes these choices. A program that draws each
        row on its own decides by row whether to truncate."""
        if params is None:
            return "greedy"
        _, top_k, top_p, *_ = params
        return "sample" if self._by_row or truncates_any(top_k, top_p) else "sample_all"

    def prepare_counts(self) -> None:
        """Begins to compile what requests with penalties need, in the background."""
        for kind in ("recount", "adjust", "tally", "greedy"):
            self._compiler.start(ProgramKey(kind))

    def recount(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Counts the tokens of a row anew; the first call allocates the counts of all rows."""
        shapes = self._steps.shapes
        if self.counts is None:
            shape = (shapes.rows, self._steps.config.vocab_size)
            self.counts = jnp.zeros(shape, jnp.int32, device=self._sharding)
        ids = np.full(shapes.blocks * self._steps.layout.page.block_size, -1, np.int32)
        end = len(prompt) + len(output)
        ids[: len(prompt)], ids[len(prompt) : end] = prompt, output
        is_output = np.arange(len(ids)) >= len(prompt)
        self.counts = self._compiler.call(
            ProgramKey("recount"), self.counts, np.int32(row), ids, is_output
        )

    def tally(self, update: np.ndarray) -> None:
        """Counts the current tokens of the rows under `update` bool[R] as generated."""
        key = ProgramKey("tally")
        self.counts = self._compiler.call(key, self.counts, self.tokens, update)

    def adjust(self, logits: jax.Array, penalties: Sequence | None, biases: Sequence) -> jax.Array:
        """Returns the logits of all rows after biases and penalties.

        - `penalties`: sampler.adjust's arrays after the counts, which must exist (`recount`); None
          for biases alone.
        - `biases`: sampler.adjust's `bias_ids` and `bias`.
        """
        bucket = self._keys.bucket(logits.shape[0])
        if penalties is None:
            return self._compiler.call(ProgramKey("add_bias", bucket), logits, *biases)
        key = ProgramKey("adjust", bucket)
        return self._compiler.call(key, logits, self.counts, *penalties, *biases)

    def allow(self, logits: jax.Array, words: np.ndarray) -> jax.Array:
        """Returns the logits of all rows after sampler.allow.

        - `words`: int32[R, W], as `TokenRules.words`.
        """
        return self._compiler.call(
            ProgramKey("allow", self._keys.bucket(logits.shape[0])), logits, words
        )

    def token_logprobs(
        self, logits: jax.Array, tokens: jax.Array, wanted: np.ndarray
    ) -> tuple[jax.Array, ...]:
        """Returns pallas_kernels.sample.logprobs of the rows under `wanted` bool[R], with as many
        likeliest tokens as requests may ask for."""
        key = ProgramKey("logprobs", self._keys.bucket(logits.shape[0]))
        return self._compiler.call(key, logits, tokens, wanted)

    def place(self, values: np.ndarray, update: np.ndarray) -> None:
        """Makes values int32[R] the current tokens of the rows under `update` bool[R]."""
        tokens = self.tokens
        if self._on_host and (isinstance(tokens, np.ndarray) or is_ready(tokens)):
            self.tokens = np.where(update, values, tokens)  # a program takes longer
            return
        self.tokens = self._compiler.call(ProgramKey("place"), update, values, self.tokens)
