"""What each expert of a model sees of some texts, for quantizers that ask for it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from host_offload.traces.reader import Trace, read_trace
from host_offload.versions.encoders import WORKERS, EncodingError, pack_quantized
from host_offload.versions.gptq import gptq_expert
from host_offload.versions.quantizers import UnquantizableError, to_float32
from moejax.errors import UserError
from moejax.evaluate.evaluation import perplexity
from moejax.serve.llm import LLM
from pallas_kernels.expert_ffn.activation import ACTIVATIONS
from pallas_kernels.records import RecordFormat


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """trace: of a run over the texts, with the routers' inputs, which are the experts' too. tokens:
    of all texts. digest: 8 hex digits that tell one choice of texts from another."""

    trace: Trace
    hidden_act: str
    tokens: int
    digest: str


def layer_inputs(
    trace: Trace, layer: int, otherwise: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs float16[N, D], ids int16[N, k], weights float[N, k]) of all tokens in a MoE layer.
    Raises UserError, with what to do otherwise, where an input is beyond float16."""
    inputs, ids, weights = (
        np.concatenate([chunk.array(f"token.{name}")[:, layer] for chunk in trace.chunks])
        for name in ("gate_input", "ids", "weights")
    )
    if not np.isfinite(inputs).all():
        raise UserError(
            f"inputs of MoE layer {layer} are beyond float16, in which they are recorded; "
            f"{otherwise}"
        )
    return inputs, ids, weights


def inside(inputs: np.ndarray, gate: np.ndarray, up: np.ndarray, hidden_act: str) -> np.ndarray:
    """float32[n, I], what an expert's down sees of inputs [n, D]. gate, up: float32[I, D]."""
    gated = np.asarray(ACTIVATIONS[hidden_act](jnp.asarray(inputs @ gate.T)))
    return gated * (inputs @ up.T)


@contextlib.contextmanager
def expert_inputs(
    model: pathlib.Path, files: Sequence[pathlib.Path], tokens: int, scratch: pathlib.Path
) -> Iterator[ExpertInputs]:
    """Runs the model over the first `tokens` tokens of each file.

    scratch: a directory with room for tokens · MoE layers · 2·D bytes, given back at the end.
    Raises UserError for files that cannot be read and as LLM and perplexity do.
    """
    texts = {str(file): _text(file) for file in files}
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".calibration-") as directory:
        trace = pathlib.Path(directory) / "trace"
        with LLM(str(model), trace=trace, trace_arrays="gate_input", max_num_seqs=16) as llm:
            window = min(512, llm.engine.scheduler.max_model_len)
            result = perplexity(llm, texts, window=window, stride=window, limit=tokens)
            hidden_act = llm.engine.runner.config.hidden_act
        said = "".join(f"{text.sha256} {text.tokens}\n" for text in result.texts)
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        yield ExpertInputs(read_trace(trace), hidden_act, result.total.tokens, digest)


def gptq_records(
    weights: np.ndarray, fmt: RecordFormat, inputs: ExpertInputs, layer: int
) -> np.ndarray:
    """uint16[E, rows, D]: a MoE layer's experts by host_offload.versions.gptq, each for what it
    sees of the texts. weights: [E, 3·I, D]. Raises EncodingError for weights that no scale
    holds."""
    seen, ids, _ = layer_inputs(inputs.trace, layer, "use quantizer rtn or mse")
    records = np.empty((len(weights), fmt.rows, fmt.hidden), np.uint16)

    def one(expert: int) -> str | None:
        matrices = to_float32(weights[expert]).reshape(3, fmt.width, fmt.hidden)
        if not np.isfinite(matrices).all():
            return "weights are NaN or infinite"
        mine = seen[(ids == expert).any(1)].astype(np.float32)
        hidden = inside(mine, matrices[0], matrices[1], inputs.hidden_act)
        try:
            pack_quantized(gptq_expert(matrices, mine, hidden, fmt), fmt, records[expert])
        except UnquantizableError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(WORKERS) as pool:
        failed = {i: why for i, why in enumerate(pool.map(one, range(len(weights)))) if why}
    if failed:
        raise EncodingError(tuple(failed), next(iter(failed.values())))
    return records


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as text in UTF-8: {error}") from None
