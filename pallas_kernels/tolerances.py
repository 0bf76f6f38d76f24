"""The largest deviation from a float64 computation on the same inputs, for each op and dtype.

|got − want| ≤ tolerance · (1 + |want|). Inputs are scaled so that results are about 1. A 16-bit
result is rounded once (relative 2^-8 in bfloat16, 2^-11 in float16), and so are intermediate values
that the op's docstring names.
"""

TOLERANCES: dict[str, dict[str, float]] = {
    "linear": {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4},
    "head_linear": {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4},
    "rms_norm": {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3},
    "layer_norm": {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4},
    "route": {"float32": 1e-6},
    "combine": {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4},
    "kv_write": {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3},
    "latent_write": {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3},
    "paged_attention": {"float32": 2e-6, "bfloat16": 5e-3, "float16": 7e-4},
    "gated_delta": {"float32": 4e-6, "bfloat16": 5e-3, "float16": 7e-4},
    "short_conv": {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4},
    "selective_scan": {"float32": 4e-6, "bfloat16": 5e-3, "float16": 7e-4},
    "expert_ffn": {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4},
    "sample": {"float32": 2e-6},
    "fill_ffn": {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4},
}
