"""The engines of `peers`, each in a process of its own, and the GGUF file that llama.cpp reads.

    PYTHON -m scripts.bench.peer_engines ENGINE TASK      answers questions, a line of JSON each
    PYTHON -m scripts.bench.peer_engines gguf SOURCE FILE [TYPE [experts]]

Nothing here needs more than numpy before an engine is made: llama.cpp's interpreter may have
neither jax nor torch.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

SEED = 20
PROCESS = 550_000_000
"""Bytes that a process of moejax takes besides `host_memory`: the interpreter, jax, programs."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What every engine of a comparison is given: the same tokens and threads."""

    model: str
    """A checkpoint's directory, or a GGUF file."""
    vocabulary: int
    batch: int = 8
    """Sequences of the largest decode step."""
    context: int = 128
    """Tokens of each sequence before the first step."""
    steps: int = 32
    """Forced tokens after the context; a longer block begins again with the first."""
    prompt: int = 512
    """Tokens of the timed prefill."""
    threads: int = 2
    precision: str | None = None
    """The version of moejax's experts; None: as the checkpoint has them."""
    arithmetic: str = "exact"
    """Of moejax."""
    dtype: str = "auto"
    """Of moejax."""

    job: int = 0
    """Prompts of a job; 0: there is none."""
    answer: int = 32
    """Tokens of each answer of a job."""
    memory: int = 0
    """Bytes that the process may take, so that moejax leaves experts in the file; 0: no limit."""
    text: str = ""
    """A file int32[n] with the tokens of a text; empty: tokens are random."""

    def jobs(self) -> list[list[int]]:
        """The job's prompts, of 32 to 96 tokens."""
        lengths = np.random.default_rng((SEED, 2)).integers(32, 97, size=self.job)
        return [self._drawn(3 + i, (int(n),)).tolist() for i, n in enumerate(lengths)]

    def decoded(self) -> np.ndarray:
        """int32[batch, context + steps + 1]: contexts, forced tokens, and the last one's next."""
        return self._drawn(0, (self.batch, self.context + self.steps + 1))

    def prefilled(self) -> np.ndarray:
        """int32[prompt]."""
        return self._drawn(1, (self.prompt,))

    def _drawn(self, stream: int, shape: tuple[int, ...]) -> np.ndarray:
        if self.text:
            return np.resize(np.roll(np.load(self.text), -1000 * stream), shape)
        random = np.random.default_rng((SEED, stream))
        return random.integers(self.vocabulary, size=shape).astype(np.int32)


class Engine(Protocol):
    """Each call but `decode` returns when its result is there."""

    versions: dict[str, str]

    def start(self, batch: int) -> None:
        """Prefills the contexts of the first `batch` sequences, unless they are there."""
        ...

    def decode(self, tokens: np.ndarray, position: int) -> Callable[[], np.ndarray]:
        """Begins a step of tokens int32[batch] at this position. Returns what waits for its logits
        float32[batch, V]."""
        ...

    def prefill(self, tokens: np.ndarray) -> None:
        """Computes a prompt of its own up to the logits of its last token, and forgets it."""
        ...

    def job(self, prompts: list[list[int]]) -> int:
        """Answers the prompts greedily, by task.answer tokens each. Returns the tokens of all."""
        ...


class MoejaxEngine:
    def __init__(self, task: Task):
        from moejax import LLM
        from pallas_kernels.cpu.library import instruction_set, why_not_cpu

        if reason := why_not_cpu():
            raise RuntimeError(reason)
        self.task = task
        experts: dict[str, Any] = {"expert_budget": 0}  # the store is the same memory
        if task.memory:
            experts = {"store": f"file,host_memory={task.memory - PROCESS}"}
        self.llm = LLM(
            task.model,
            **experts,
            precision=task.precision,
            arithmetic=task.arithmetic,
            dtype=task.dtype,
            threads=task.threads,
            max_num_seqs=task.batch,
            max_model_len=max(task.context + task.steps, task.prompt) + 2,
            max_num_batched_tokens=max(task.prompt, task.context),
            enable_prefix_caching=False,
            progress=False,
        )
        if not task.job:  # which begins at once
            self.llm.engine.runner.wait_compiled(everything=True)
            self.llm.engine.runner.store.wait()
        self.versions = {"jax": import_module("jax").__version__, "ops": instruction_set()}
        self._requests: list[Any] = []

    def start(self, batch: int) -> None:
        from scripts.parts.decode_timing import prefill

        if len(self._requests) == batch:
            return
        self._stop()
        prompts = self.task.decoded()[:batch, : self.task.context].tolist()
        self._requests, self._sequences = prefill(self.llm.engine, prompts, self.task.steps)

    def decode(self, tokens: np.ndarray, position: int) -> Callable[[], np.ndarray]:
        runner, rows = self.llm.engine.runner, list(self._sequences.rows)
        positions = np.full(runner.shapes.rows, -1, np.int32)
        positions[rows] = position
        current = np.zeros(runner.shapes.rows, np.int32)
        current[rows] = tokens
        runner.tokens.place(current, positions >= 0)
        output = runner.decode(positions, self._sequences.block_table)
        return lambda: np.asarray(output.logits)[rows]

    def prefill(self, tokens: np.ndarray) -> None:
        from moejax import SamplingParams

        self._stop()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = self.llm.engine.add(tokens.tolist(), params)
        while not request.output:
            self.llm.engine.step()

    def job(self, prompts: list[list[int]]) -> int:
        from moejax import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=self.task.answer, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def floor(self, batch: int, tokens: int) -> dict[str, float]:
        """The bytes that a step of so many tokens reads: weights, states, KV and the experts that
        so many tokens choose if all are equally likely; its seconds if reading alone took time."""
        from moejax.costs.rates import measure_memory_rate
        from scripts.parts.decode_timing import step_bytes

        runner = self.llm.engine.runner
        config, context = runner.config, self.task.context if batch == tokens else 0
        each = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens
        active = sum(config.moe_layers) * config.num_experts * each
        read = step_bytes(runner, active, batch=batch, context=context)
        nbytes = sum(read.values())
        return {"bytes": nbytes, "seconds": nbytes / measure_memory_rate(runner.device)}

    def _stop(self) -> None:
        """Ends the decoded sequences: the engine would go on with them beside a prompt."""
        self.llm.engine.abort(self._requests)
        self._requests = []


class TransformersEngine:
    """All sequences have the context of the first one: only that one's scores are comparable.

    Keys and values behind a step's position are cut off. States cannot be: the first step after the
    context takes those of the context anew, and its copy of them is timed.
    """

    def __init__(self, task: Task):
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(task.threads)
        torch.set_grad_enabled(False)
        self._tensor = torch.from_numpy
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtype = torch.bfloat16 if fast else torch.float32
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.task, self.model = task, load(task.model, dtype=dtype).eval()
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.versions = versions | {"dtype": str(dtype)}
        if task.job:
            return
        # Its products may be slow: one context is computed, the others are copies.
        tokens = self._tensor(task.decoded()[:1, : task.context]).long()
        cache = self.model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        self._caches = {1: cache}
        self._context = task.context
        self._states = "linear_attention" in (getattr(self.model.config, "layer_types", None) or ())

    def start(self, batch: int) -> None:
        if batch not in self._caches:
            self._caches[batch] = copy.deepcopy(self._caches[1])
            self._caches[batch].reorder_cache(self._tensor(np.zeros(batch, np.int64)))
        self._first = self._cache = self._caches[batch]

    def decode(self, tokens: np.ndarray, position: int) -> Callable[[], np.ndarray]:
        if self._states:
            if position == self._context:
                self._cache = copy.deepcopy(self._first)
        elif behind := self._cache.get_seq_length() - position:
            self._cache.crop(-behind)
        given = self._tensor(tokens).long()[:, None]
        output = self.model(given, past_key_values=self._cache, use_cache=True)
        logits = output.logits[:, -1].float().numpy()
        return lambda: logits

    def job(self, prompts: list[list[int]]) -> int:
        ordered, batch, count = sorted(prompts, key=len), self.task.batch, 0
        for first in range(0, len(ordered), batch):
            mine = ordered[first : first + batch]
            longest = len(mine[-1])
            tokens = np.array([[0] * (longest - len(p)) + p for p in mine])
            there = np.array([[0] * (longest - len(p)) + [1] * len(p) for p in mine])
            found = self.model.generate(
                self._tensor(tokens),
                attention_mask=self._tensor(there),
                do_sample=False,
                min_new_tokens=self.task.answer,
                max_new_tokens=self.task.answer,
            )
            count += found.shape[0] * (found.shape[1] - longest)
        return count

    def prefill(self, tokens: np.ndarray) -> None:
        self.model(self._tensor(tokens).long()[None], use_cache=True, logits_to_keep=1)


class LlamaEngine:
    """Through llama-cpp-python's bindings of llama.cpp's C interface.

    States cannot be cut off behind a position: of models that have them each context has a second
    sequence, from which the first step after the context begins anew.
    """

    def __init__(self, task: Task):
        self.task, self.llama = task, import_module("llama_cpp")
        model_params = self.llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = self.llama.llama_model_load_from_file(task.model.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {task.model}")
        params = self.llama.llama_context_default_params()
        longest = max(task.prompt, task.context + task.steps + 1)
        self._kept = task.batch if self.llama.llama_model_is_hybrid(self._model) else 0
        self._prompt = task.batch + self._kept  # the sequence of the timed prompt
        params.n_seq_max = self._prompt + 1
        params.n_ctx = params.n_seq_max * -(-longest // 256) * 256
        self._most = params.n_batch = params.n_ubatch = max(512, task.prompt)
        params.n_threads = params.n_threads_batch = task.threads
        params.no_perf = True
        self._context = self.llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context of this model")
        self._memory = self.llama.llama_get_memory(self._context)
        self._batch = self.llama.llama_batch_init(params.n_batch, 0, 1)
        self._started = 0
        features = re.findall(r"(\w+) = 1", self.llama.llama_print_system_info().decode())
        self.versions = {"llama-cpp-python": self.llama.__version__, "ops": " ".join(features)}

    def start(self, batch: int) -> None:
        contexts = self.task.decoded()[:, : self.task.context]
        for i in range(self._started, batch):
            for first in range(0, self.task.context, self._most):
                tokens = contexts[i, first : first + self._most]
                at = np.arange(first, first + len(tokens))
                self._compute(tokens, at, [i + self._kept] * len(tokens), 1)
            if self._kept:
                self._begin_anew(i)
        self._started = max(self._started, batch)

    def decode(self, tokens: np.ndarray, position: int) -> Callable[[], np.ndarray]:
        count = len(tokens)
        for i in range(count):
            if not self.llama.llama_memory_seq_rm(self._memory, i, position, -1):
                assert position == self.task.context
                self._begin_anew(i)
        self._compute(tokens, np.full(count, position), list(range(count)), count)
        logits = self._logits(count).copy()
        return lambda: logits

    def job(self, prompts: list[list[int]]) -> int:
        """By continuous batching: prompts join as sequences end."""
        waiting, running = list(reversed(prompts)), {}
        free, count = list(range(self.task.batch)), 0
        while waiting or running:
            rows = [(tokens[-1], len(tokens) - 1, i, True) for i, (tokens, _) in running.items()]
            while waiting and free and len(rows) + len(waiting[-1]) <= self._most:
                prompt, i = waiting.pop(), free.pop()
                running[i] = prompt, len(prompt) + self.task.answer
                rows += [(t, at, i, at + 1 == len(prompt)) for at, t in enumerate(prompt)]
            tokens, positions, sequences, wanted = zip(*rows, strict=True)
            self._compute(np.array(tokens), np.array(positions), list(sequences), list(wanted))
            for i, chosen in zip(
                [i for i, said in zip(sequences, wanted, strict=True) if said],
                self._logits(sum(wanted)).argmax(-1).tolist(),
                strict=True,
            ):
                mine, most = running[i]
                mine.append(chosen)
                count += 1
                if len(mine) == most:
                    self.llama.llama_memory_seq_rm(self._memory, i, -1, -1)
                    del running[i]
                    free.append(i)
        return count

    def generate(self, prompt: list[int], count: int, drafted: int) -> list[int]:
        """Greedily, with at most `drafted` tokens of prompt lookup a step, as llama-cpp-python has
        it (LlamaPromptLookupDecoding; its n-grams of at most two tokens)."""
        find = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        look_up = find(num_pred_tokens=drafted)
        tokens, sequence = list(prompt), self._prompt
        self._compute(
            np.array(prompt[:-1]), np.arange(len(prompt) - 1), [sequence] * len(prompt), 1
        )
        while len(tokens) < len(prompt) + count:
            most = min(drafted, len(prompt) + count - len(tokens) - 1)
            drafts = look_up(np.array(tokens, np.intc))[:most].tolist() if most else []
            given = np.array([tokens[-1], *drafts])
            first = len(tokens) - 1
            positions = np.arange(first, first + len(given))
            self._compute(given, positions, [sequence] * len(given), len(given))
            chosen = self._logits(len(given)).argmax(-1).tolist()
            right = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
            tokens += chosen[: right + 1]
            self.llama.llama_memory_seq_rm(self._memory, sequence, len(tokens) - 1, -1)
        self.llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return tokens[len(prompt) :]

    def prefill(self, tokens: np.ndarray) -> None:
        last = self._prompt
        self._compute(tokens, np.arange(len(tokens)), [last] * len(tokens), 1)
        self.llama.llama_get_logits(self._context)
        self.llama.llama_memory_seq_rm(self._memory, last, -1, -1)

    def _logits(self, count: int) -> np.ndarray:
        """[count, V], valid until the next batch."""
        logits = self.llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(count, self.task.vocabulary))

    def _begin_anew(self, i: int) -> None:
        """Makes sequence i what it was after its context."""
        self.llama.llama_memory_seq_rm(self._memory, i, -1, -1)
        self.llama.llama_memory_seq_cp(self._memory, i + self._kept, i, -1, -1)

    def _compute(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        sequences: list[int],
        logits: int | list[bool],
    ) -> None:
        """Runs one batch; the last `logits` tokens give logits, or those that are named."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = int(tokens[i]), int(positions[i])
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[i]
            batch.logits[i] = i >= count - logits if isinstance(logits, int) else logits[i]
        if status := self.llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        self.llama.llama_synchronize(self._context)


ENGINES: dict[str, Callable[[Task], Engine]] = {
    "moejax": MoejaxEngine,
    "llama.cpp": LlamaEngine,
    "transformers": TransformersEngine,
}


# ---- questions and answers


def serve(engine_name: str, task: Task) -> None:
    """Answers on stdout, which nothing else may write to, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    engine = ENGINES[engine_name](task)
    answer(versions=engine.versions)
    for line in sys.stdin:
        answer(**answered(engine, task, json.loads(line)))


def answered(engine: Engine, task: Task, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to {"what": "decode", "batch", "seconds", "first"}, {"what": "prefill"}, {"what":
    "check", "batch", "steps", "logits"}, which writes logits into a file if one is named, {"what":
    "job", "most"}, of moejax {"what": "floor", "batch", "tokens"}, of llama.cpp {"what":
    "generate", "prompt", "count", "drafted"}."""
    if question["what"] == "generate":
        assert isinstance(engine, LlamaEngine)
        began = time.perf_counter()
        tokens = engine.generate(question["prompt"], question["count"], question["drafted"])
        return {"seconds": time.perf_counter() - began, "tokens": tokens}
    if question["what"] == "floor":
        assert isinstance(engine, MoejaxEngine)
        return engine.floor(question["batch"], question["tokens"])
    if question["what"] == "job":
        return {"tokens": engine.job(task.jobs()[: question.get("most")])}
    if question["what"] == "prefill":
        return {"seconds": timed_steps(lambda i: engine.prefill(task.prefilled()), 1)}
    batch = question["batch"]
    tokens = task.decoded()[:batch]
    engine.start(batch)

    def begin(i: int) -> Callable[[], np.ndarray]:
        position = task.context + (i + question.get("first", 0)) % task.steps
        return engine.decode(tokens[:, position], position)

    if question["what"] == "check":
        following = tokens[:, task.context + 1 :]
        found = np.stack([begin(i)() for i in range(question.get("steps", task.steps))])
        if path := question.get("logits"):
            np.save(path, found)
        return {"scores": [scores(each, following[:, i]) for i, each in enumerate(found)]}
    begin(0)()  # caches of another engine's weights are nobody's step
    running = begin(0)

    def step(i: int) -> None:
        """As moejax generates: a step is begun before the last one is read."""
        nonlocal running
        last, running = running, begin(i + 1)
        last()

    seconds = timed_steps(step, task.steps, question["seconds"])
    running()
    return {"seconds": seconds}


def scores(logits: np.ndarray, tokens: np.ndarray) -> list[float]:
    """Log-probabilities of the tokens [batch] by the logits [batch, V]."""
    return log_softmax(logits)[np.arange(len(tokens)), tokens].tolist()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))


def timed_steps(step: Callable[[int], object], most: int, limit_s: float = 0.0) -> list[float]:
    """Seconds of each step, as many as fit into limit_s, but at least one."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < most and sum(seconds) < limit_s):
        start = time.perf_counter()
        step(len(seconds))
        seconds.append(time.perf_counter() - start)
    return seconds


# ---- GGUF

MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
"""Tensors of a layer: the checkpoint's names → GGUF's, as in conversion/olmo.py of llama.cpp."""

ARCHITECTURES = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe", "qwen3_5_moe_text": "qwen35moe"}
"""config.json's model_type → GGUF's name."""

TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_S": 14, "Q4_K_M": 15, "Q6_K": 18, "MXFP4": 38}
"""llama_ftype."""


def write_gguf(directory: Path, path: Path) -> None:
    """Writes a checkpoint of OLMoE, Qwen3 or Qwen3.5 as a GGUF file: routers, norms and what
    decides states in float32, the rest in bfloat16, no tokenizer, as every token is forced."""
    gguf: Any = import_module("gguf")
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"]
    named = hybrid_tensors if kind == "qwen3_5_moe_text" else gguf_tensors
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if kind == "qwen3_5_moe_text":
        add_hybrid(writer, config)
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_rope_freq_base(config["rope_theta"])
    if kind == "qwen3_moe":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16))
    writer.add_tokenizer_model("none")
    for name, tensor in named(directory, config):
        coded = None if tensor.dtype == np.float32 else gguf.GGMLQuantizationType.BF16
        shape = tensor.shape if coded is None else tensor.view(np.uint8).shape
        dtype = tensor.dtype if coded is None else np.dtype(np.uint8)
        writer.add_tensor_info(name, shape, dtype, tensor.nbytes, coded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in named(directory, config):
        writer.write_tensor_data(tensor)
    writer.close()


def add_hybrid(writer: Any, config: dict[str, Any]) -> None:
    """Writes the keys that only Qwen3.5 has."""
    rope, head = config["rope_parameters"], config["head_dim"]
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])


def gguf_tensors(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's name and values of each tensor, one in memory at a time; bfloat16 as uint16."""
    tensors = bfloat16_tensors(directory)

    def named(source: str, target: str) -> tuple[str, np.ndarray]:
        bits = tensors[f"{source}.weight"]
        if bits.ndim == 1 or target.endswith("ffn_gate_inp"):
            bits = (bits.astype(np.uint32) << 16).view(np.float32)
        return f"{target}.weight", bits

    for source, target in MODEL.items():
        if source != "lm_head" or not config["tie_word_embeddings"]:
            yield named(source, target)
    for layer in range(config["num_hidden_layers"]):
        for source, target in LAYER.items():
            yield named(f"model.layers.{layer}.{source}", f"blk.{layer}.{target}")
    yield from expert_tensors(tensors, config)


def expert_tensors(
    tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """The experts of a layer as one tensor for each matrix."""
    for layer in range(config["num_hidden_layers"]):
        for matrix in ("gate", "up", "down"):
            prefix = f"model.layers.{layer}.mlp.experts"
            names = (f"{prefix}.{e}.{matrix}_proj.weight" for e in range(config["num_experts"]))
            yield f"blk.{layer}.ffn_{matrix}_exps.weight", np.stack([tensors[n] for n in names])


def hybrid_tensors(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """As gguf_tensors of a checkpoint of Qwen3.5, by conversion/qwen.py of llama.cpp."""
    gguf: Any = import_module("gguf")
    tensors = bfloat16_tensors(directory)
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, config["num_hidden_layers"])
    for name, bits in tensors.items():
        if ".experts." not in name:
            target = found.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
            yield target, hybrid_values(name, tiled_heads(name, bits, config))
    yield from expert_tensors(tensors, config)


def hybrid_values(name: str, bits: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16, or float32. Norms get one added; A_log becomes what it stands for."""
    if bits.ndim > 1 and not name.endswith(("conv1d.weight", "gate.weight")):
        return bits
    wide = (bits.astype(np.uint32) << 16).view(np.float32).squeeze()
    if name.endswith("A_log"):
        return -np.exp(wide)
    one = name.endswith("norm.weight") and "linear_attn" not in name
    return wide + 1 if one else wide


def tiled_heads(name: str, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Value heads of gated delta nets in the order of llama.cpp: the first one of each key head,
    then the second of each."""
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    first, axis = 0, 0
    if "linear_attn." not in name or "linear_attn.norm" in name:
        return x
    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * keys * config["linear_key_head_dim"]
    elif "out_proj" in name:
        axis = 1
    elif "in_proj_z" not in name:
        width = 1
    before, after = np.split(x, [first], axis)
    apart = after.reshape(*x.shape[:axis], keys, -1, width, *x.shape[axis + 1 :])
    tiles = apart.swapaxes(axis, axis + 1).reshape(after.shape)
    return np.concatenate([before, tiles], axis)


def bfloat16_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a directory's safetensors files, as views of their bits in uint16."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        end = 8 + int(data[:8].view(np.uint64)[0])
        for name, entry in json.loads(bytes(data[8:end])).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
            first, last = (end + offset for offset in entry["data_offsets"])
            tensors[name] = data[first:last].view(np.uint16).reshape(entry["shape"])
    return tensors


def quantize(source: Path, path: Path, kind: str, experts_only: bool) -> None:
    """Writes a GGUF file with tensors of that type. experts_only: attention, head and embeddings
    stay bfloat16."""
    llama: Any = import_module("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    overrides = (llama.llama_model_tensor_override * 2)()
    if experts_only:
        bfloat16 = int(import_module("gguf").GGMLQuantizationType.BF16)
        overrides[0].pattern, overrides[0].type = rb"attn_(q|k|v|output)\.weight", bfloat16
        params.tt_overrides = overrides
        params.output_tensor_type = params.token_embedding_type = bfloat16
    if status := llama.llama_model_quantize(str(source).encode(), str(path).encode(), params):
        raise RuntimeError(f"llama_model_quantize returned {status}")


def run(arguments: list[str]) -> None:
    what, first, *rest = arguments
    if what != "gguf":
        serve(what, Task(**json.loads(first)))
    elif len(rest) == 1:
        write_gguf(Path(first), Path(rest[0]))
    else:
        quantize(Path(first), Path(rest[0]), rest[1], "experts" in rest[2:])


if __name__ == "__main__":
    gc.set_threshold(import_module("moejax.commands.main").GARBAGE)  # as `moejax` does
    run(sys.argv[1:])
