"""Wrote the GGUF files beside it: random models, quantized by llama.cpp.

python -m tests.models.llama_cpp.write  # llama-cpp-python 0.3.36, gguf 0.19.0, transformers 5.24.0
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.moejax.gguf_models import gguf_model

_WIDE = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 2,
    "vocab_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,  # rows that are no multiple of 256, for which llama.cpp takes another type
}
_NARROW = {**_WIDE, "hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}

MODELS = {
    "Q4_K_M": {**_WIDE, "num_hidden_layers": 2},
    "Q5_K_M": {**_WIDE, "num_hidden_layers": 1},
    "Q6_K": {**_WIDE, "num_hidden_layers": 1},
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4_MOE"), _NARROW),
}
"""Name of llama.cpp's mix of types → the config of the model."""

if __name__ == "__main__":
    import llama_cpp

    for mix, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            whole = Path(directory, "whole.gguf")
            gguf_model(whole, experts="F32", others="F32", **config)
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mix}")
            to = Path(__file__).with_name(f"{mix}.gguf")
            wrong = llama_cpp.llama_model_quantize(bytes(whole), bytes(to), options)
            assert not wrong, mix
