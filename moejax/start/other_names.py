"""Names of vLLM, llama.cpp and Ollama for what moejax has too, for messages."""

from __future__ import annotations

from collections.abc import Callable

_EXPERTS = "{expert_budget} is the share of experts on the device, such as 25%"
_CONTEXT = "{max_model_len} is most tokens of prompt and text together"
_PROMPT = 'the prompt needs no option: moejax generate "PROMPT"'
_MODEL = "--model is a directory, a GGUF file or a Hub id"
_TOKENS = "--max-tokens is most tokens to generate"

OTHER_NAMES = {
    "budget": "{expert_budget} is memory for experts such as 25%, {kv_budget} for KV, and {memory} "
    "for both",
    "gpu_memory_utilization": "{memory} is bytes for experts and KV, such as 16GiB (default: what "
    "fits)",
    "tensor_parallel_size": f"one model runs on one device, and {_EXPERTS}",
    "quantization": "{precision} is int8, int4 or int2; a quantized checkpoint needs no option",
    "cpu_offload_gb": _EXPERTS,
    "n_gpu_layers": _EXPERTS,
    "n_cpu_moe": _EXPERTS,
    "override_tensor": _EXPERTS,
    "-ngl": _EXPERTS,
    "ctx_size": _CONTEXT,
    "n_ctx": _CONTEXT,
    "-c": _CONTEXT,
    "-np": "{max_num_seqs} is how many sequences run at once",
    "--n-predict": _TOKENS,
    "--max-new-tokens": _TOKENS,
    "-n": _TOKENS,
    "--temp": "--temperature is the randomness",
    "--repeat-penalty": "--repetition-penalty is the factor",
    "--reverse-prompt": "--stop ends before a text",
    "-r": "--stop ends before a text",
    "-m": _MODEL,
    "-t": "--threads is the number of CPU threads",
    "-sys": "--system is the system's message, with --chat",
    "-cnv": "moejax chat is a conversation",
    "--no-mmap": "--store memory or file says where experts are kept",
    "trust_remote_code": "moejax runs no code of a checkpoint",
    "served_model_name": "moejax serve has --served-model-name",
    "run": "moejax chat is a conversation, moejax generate goes on with a text",
    "complete": "moejax generate goes on with a text",
    "pull": "a model is downloaded when it is first used",
    "--prompt": _PROMPT,
    "-p": _PROMPT,
}
"""What to use instead of a keyword, a command, or a flag that is no keyword; options of moejax are
in braces."""

_OPTIONS = (
    *("memory", "expert_budget", "kv_budget", "precision", "max_model_len", "max_num_seqs"),
)


def use_instead(name: str, spell: Callable[[str], str] = str) -> str:
    """Returns the end of a message that says what to use instead of another engine's option, or ""
    for other names.

    - `name`: a keyword, or a flag with its dashes.
    - `spell`: how the message writes an option of moejax.
    """
    known = name if name in OTHER_NAMES else name.removeprefix("--").replace("-", "_")
    if known not in OTHER_NAMES:
        return ""
    return "; " + OTHER_NAMES[known].format_map({option: spell(option) for option in _OPTIONS})
