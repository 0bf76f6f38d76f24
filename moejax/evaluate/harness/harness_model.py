"""A model of moejax for lm-evaluation-harness 0.4 (``lm_eval --model moejax``)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from moejax.errors import UserError, user_errors
from moejax.requests.request import GenerationRequest
from moejax.requests.sampling_params import SamplingParams
from moejax.serve.generation import run_scores
from moejax.serve.llm import LLM
from moejax.start.options import Config

MAX_GEN_TOKS = 256
"""Most tokens of a text if neither the task nor the model's arguments name a number, as in the
harness's own models."""

_NOT_CHOSEN = ("cuda", "cuda:0")

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_WITHOUT_EFFECT: dict[str, Any] = {"num_beams": 1, "use_cache": True, "do_sample": None}
"""Arguments of transformers' generate that change nothing here, with their harmless value; None:
any value."""

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""The request's own text, the tokens before, and the tokens to score."""


class MoejaxLM(TemplateLM):
    """One LLM behind the harness's three kinds of request, which the engine batches. Results are in
    the order of the requests, and no bit of them depends on a budget.

    - `pretrained`: what LLM takes as its model, or an LLM, which then has its options already.
    - `max_length`: LLM's max_model_len, under the name of the harness's models.
    - `max_gen_toks`: most tokens of a text if the task names no number.
    - `batch_size`, `max_batch_size`: the harness gives them to every model; the engine needs none.
    - `options`: further keywords of LLM, such as expert_budget="25%".

    Raises UserError for an option that is unknown or impossible, a model without a tokenizer (see
    LLM's tokenizer), and like LLM.
    """

    def __init__(
        self,
        pretrained: str | LLM,
        *,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, LLM):
            if options or max_length is not None:
                raise UserError("an LLM has its options already; give them where it is made")
            self.llm = pretrained
        else:
            if max_length is not None:
                options["max_model_len"] = max_length
            if device not in (None, *_NOT_CHOSEN):
                options["device"] = device
            with user_errors(TypeError, "model_args of moejax: "):
                asked = Config.of(pretrained, **{"progress": False, **options})
            self.llm = LLM.from_config(asked)
        found = self.llm.get_tokenizer()
        if found is None:
            raise UserError(
                f"{self.llm.model} has no tokenizer, and the harness's tasks are text; name the "
                "directory of one: tokenizer=DIR in model_args, --tokenizer DIR of moejax eval"
            )
        self.tokenizer = found  # of TemplateLM, whose chat_template reads it
        self._max_gen_toks = max_gen_toks

    # ---- what the harness asks of a model

    @property
    def max_length(self) -> int:
        """Most tokens of a window: LLM's max_model_len."""
        return self.llm.engine.scheduler.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """The name of the harness's caches of requests."""
        return str(self.tokenizer.name_or_path or self.llm.model).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text, or else the model's. Raises UserError without one."""
        if isinstance(found := self.tokenizer.eos_token_id, int):
            return found
        if ids := self.llm.engine.eos_token_ids:
            return min(ids)
        raise UserError(f"{self.llm.model} names no end-of-text token, before which texts begin")

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: beginning of text, or else its end."""
        beginning = self.tokenizer.bos_token_id
        return beginning if isinstance(beginning, int) else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns a text's ids.

        - `add_special_tokens`: None: as the tokenizer does with a prompt, but without a second
          beginning of text.
        - `kwargs`: of the harness's signature; none is known.
        """
        if add_special_tokens is None:
            beginning = str(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = not (beginning and string.startswith(beginning))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as the tokenizer's template writes it; without system messages if
        the template refuses them, like the harness's own models. Raises UserError without a
        template."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{self.llm.model} has no chat template; leave out --apply_chat_template "
                "(--apply-chat-template), or add one to its tokenizer_config.json"
            )

        def write(messages: list[dict[str, str]]) -> str:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            assert isinstance(text, str)
            return text

        try:
            return write(chat_history)
        except TemplateError:
            return write([one for one in chat_history if one["role"] != "system"])

    # ---- requests

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns ln p of each text; each token has as much context as its window."""
        texts = [str(request.args[0]) for request in requests]
        windows = [
            (place, *make_disjoint_window(pair))
            for place, text in enumerate(texts)
            for pair in get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
        ]
        found: list[list[float]] = [[] for _ in texts]
        engine = self.llm.engine
        self.llm.stats()  # refuses an LLM that is closed or lent
        bar = tqdm(total=len(windows), desc="moejax: rolling windows", disable=disable_tqdm)
        sequences = (before + scored for _, before, scored in windows)
        most = 2 * engine.scheduler.prefill_chunks
        with bar, contextlib.closing(run_scores(engine, sequences, most)) as steps:
            for ended in steps:
                for number, scores in ended:
                    place, _, scored = windows[number]
                    found[place].extend(scores[-len(scored) :].tolist())
                bar.update(len(ended))
        # Rounded once, in whatever order windows ended.
        sums = [math.fsum(one) for one in found]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Returns (ln p, whether greedy decoding writes it) of each continuation. Each one is a
        prompt whose log-probabilities are asked for, with one more token, which is not read."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        most, bar = self.max_length - 1, tqdm(total=len(requests), disable=disable_tqdm)
        bar.set_description("moejax: log-likelihoods")

        def prompts() -> Iterator[GenerationRequest]:
            for place, (_, before, scored) in enumerate(requests):
                if len(scored) >= most:
                    raise UserError(
                        f"a continuation of {len(scored)} tokens leaves no room for context in a "
                        f"max_model_len of {self.max_length}; raise it (max_length)"
                    )
                ids = (before + scored)[-most:]  # cut from the left, as the harness's models do
                yield GenerationRequest({"prompt_token_ids": ids}, params, tag=place)

        answers: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
        with bar:
            for place, output in self._outputs(prompts()):
                _, _, scored = requests[place]
                logprobs = (output.prompt_logprobs or [])[-len(scored) :]
                found = [one[token] for one, token in zip(logprobs, scored, strict=True)]
                total = math.fsum(one.logprob for one in found)
                answers[place] = total, all(one.rank == 1 for one in found)
                bar.update(1)
        for (words, _, _), answer in zip(requests, answers, strict=True):
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns each request's text up to its first stop string, greedy if the task does not say
        how to sample. Contexts are cut from the left to leave room for max_gen_toks."""
        arguments: list[Any] = [request.args for request in requests]
        asked = [(str(context), dict(given)) for context, given in arguments]
        prompts = [self._prompt(place, *one) for place, one in enumerate(asked)]
        texts = [""] * len(asked)
        bar = tqdm(total=len(asked), desc="moejax: texts", disable=disable_tqdm)
        with bar:
            for place, output in self._outputs(prompts):
                texts[place] = output.outputs[0].text
                bar.update(1)
        for one, text in zip(asked, texts, strict=True):
            self.cache_hook.add_partial("generate_until", one, text)
        return texts

    # ---- pieces

    def _prompt(self, place: int, context: str, given: Mapping[str, Any]) -> GenerationRequest:
        """Returns the engine's request for one request of the harness. Raises UserError for
        arguments of generation that the engine does not have, and if max_gen_toks leaves no room
        for context."""
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(dict(given), self.max_gen_toks)}
        stop = [one for one in kwargs.pop("until") if one]
        tokens = kwargs.pop("max_gen_toks")
        sampling = {name: kwargs.pop(name) for name in _SAMPLING if name in kwargs}
        sampling.setdefault("temperature", 1.0 if kwargs.get("do_sample") else 0.0)
        for name, value in kwargs.items():
            if name not in _WITHOUT_EFFECT or _WITHOUT_EFFECT[name] not in (None, value):
                raise UserError(
                    f"moejax has no argument {name}={value!r} of generation; a task may give "
                    f"until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
                )
        room = self.max_length - tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks {tokens} leaves no room for a prompt in a max_model_len of "
                f"{self.max_length}; lower it (--gen_kwargs max_gen_toks=N) or raise max_length"
            )
        ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        params = SamplingParams(max_tokens=tokens, stop=stop or None, **sampling)
        return GenerationRequest({"prompt_token_ids": ids}, params, tag=place)

    def _outputs(self, prompts: Iterable[GenerationRequest]) -> Iterator[tuple[int, Any]]:
        """Yields (place, output) of each prompt as it ends. Raises the error of a prompt that
        cannot run."""
        generator: Any = self.llm.generate_each(prompts)
        with contextlib.closing(generator) as results:
            for asked, output in results:
                if isinstance(output, UserError):
                    raise output
                assert isinstance(asked.tag, int)
                yield asked.tag, output


register_model("moejax")(MoejaxLM)
