"""A checkpoint of OLMoE as a GGUF file, and quantized, as llama.cpp's own converter would.

PYTHON -m scripts.cpu.engines.gguf_file CHECKPOINT FILE             in bfloat16
PYTHON -m scripts.cpu.engines.gguf_file CHECKPOINT FILE consumed    each file deleted once written
PYTHON -m scripts.cpu.engines.gguf_file FILE FILE TYPE [experts]    all of it, or experts alone

It runs where llama-cpp-python is, which needs neither torch nor jax. Names and types are those of
conversion/olmo.py in llama-cpp-python's source: routers and norms are float32, the rest bfloat16;
there is no tokenizer, as every token is forced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

gguf: Any = import_module("gguf")
"""Not in the environment of the tests."""

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
"""Tensors of a layer: the checkpoint's names → GGUF's."""

MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

TYPES = {"Q8_0": 7, "Q4_0": 2}
"""llama_ftype."""

BFLOAT16 = int(gguf.GGMLQuantizationType.BF16)


class Checkpoint:
    """The tensors of all safetensors files of a directory, uint16 bit patterns of bfloat16."""

    def __init__(self, directory: Path):
        self._tensors: dict[str, np.ndarray] = {}
        self._names: dict[Path, set[str]] = {}
        self._read: set[str] = set()
        for path in sorted(directory.glob("*.safetensors")):
            data = np.memmap(path, np.uint8, "r")
            end = 8 + int(data[:8].view(np.uint64)[0])
            for name, entry in json.loads(bytes(data[8:end])).items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] != "BF16":
                    raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
                first, last = (end + offset for offset in entry["data_offsets"])
                self._tensors[name] = data[first:last].view(np.uint16).reshape(entry["shape"])
                self._names.setdefault(path, set()).add(name)

    def __getitem__(self, name: str) -> np.ndarray:
        self._read.add(name)
        return self._tensors[name]

    def delete_read(self) -> None:
        """Deletes the files of which every tensor was asked for."""
        for path in [path for path, names in self._names.items() if names <= self._read]:
            for name in self._names.pop(path):
                del self._tensors[name]  # which keeps the file
            path.unlink()


def convert(directory: Path, path: Path, consume: bool) -> None:
    """Writes the GGUF file of a checkpoint of OLMoE in bfloat16. consume: deletes the checkpoint's
    files as they are written, so that the disk holds little more than one of both."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "olmoe":
        raise ValueError(f"{directory}: {config['model_type']} is not olmoe")
    checkpoint, writer = Checkpoint(directory), gguf.GGUFWriter(path, "olmoe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16))
    writer.add_tokenizer_model("none")
    for name, tensor in tensors(checkpoint, config):
        kind = None if tensor.dtype == np.float32 else gguf.GGMLQuantizationType.BF16
        shape = tensor.shape if kind is None else tensor.view(np.uint8).shape
        dtype = tensor.dtype if kind is None else np.dtype(np.uint8)
        writer.add_tensor_info(name, shape, dtype, tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    checkpoint = Checkpoint(directory)
    for _, tensor in tensors(checkpoint, config):
        writer.write_tensor_data(tensor)
        del tensor
        if consume:
            checkpoint.delete_read()
    writer.close()


def tensors(checkpoint: Checkpoint, config: dict) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's name and values of each tensor, one in memory at a time."""

    def named(source: str, target: str) -> tuple[str, np.ndarray]:
        bits = checkpoint[f"{source}.weight"]
        wide = bits.ndim == 1 or target.endswith("ffn_gate_inp")
        return f"{target}.weight", (bits.astype(np.uint32) << 16).view(np.float32) if wide else bits

    for source, target in MODEL.items():
        yield named(source, target)
    for layer in range(config["num_hidden_layers"]):
        for source, target in LAYER.items():
            yield named(f"model.layers.{layer}.{source}", f"blk.{layer}.{target}")
        for matrix in ("gate", "up", "down"):
            prefix = f"model.layers.{layer}.mlp.experts"
            names = (f"{prefix}.{e}.{matrix}_proj.weight" for e in range(config["num_experts"]))
            yield f"blk.{layer}.ffn_{matrix}_exps.weight", np.stack([checkpoint[n] for n in names])


def quantize(source: Path, path: Path, kind: str, experts_only: bool) -> None:
    """llama_model_quantize. experts_only: attention, head and embeddings stay bfloat16."""
    llama_cpp: Any = import_module("llama_cpp")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], 2
    overrides = (llama_cpp.llama_model_tensor_override * 2)()
    if experts_only:
        overrides[0].pattern, overrides[0].type = rb"attn_(q|k|v|output)\.weight", BFLOAT16
        params.tt_overrides = overrides
        params.output_tensor_type = params.token_embedding_type = BFLOAT16
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params):
        raise RuntimeError(f"llama_model_quantize returned {status}")


def tensor_bytes(path: str) -> dict[str, float]:
    """Bytes of a GGUF file's tensors: of all experts, of the embeddings and of the others."""
    found = {"experts": 0.0, "embeddings": 0.0, "others": 0.0}
    for tensor in gguf.GGUFReader(path).tensors:
        kind = "experts" if "_exps." in tensor.name else "others"
        found["embeddings" if tensor.name.startswith("token_embd") else kind] += tensor.n_bytes
    return found


def main(arguments: list[str]) -> None:
    source, path, *kind = arguments
    if kind and kind != ["consumed"]:
        quantize(Path(source), Path(path), kind[0], "experts" in kind[1:])
    else:
        convert(Path(source), Path(path), consume=bool(kind))


if __name__ == "__main__":
    main(sys.argv[1:])
