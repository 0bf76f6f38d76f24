"""The summary of a run."""

from moejax.commands.generate import format_summary

STATS = {
    "model": "demo",
    "dtype": "bfloat16",
    "device": "cpu",
    "jax": "0.11.2",
    "ops": {"expert_ffn": "xla", "paged_attention": "xla"},
    "eviction": "lru",
    "prompt_tokens": 3,
    "generated_tokens": 128,
    "requests": 1,
    "ttft_s": {"mean": 0.0512, "max": 0.0512},
    "tpot_s": {"mean": 0.00251, "p50": 0.0024, "p99": 0.0041},
    "tokens_per_s": 398.44,
    "experts": {
        "activations": 2048,
        "hits": 1536,
        "fills": 500,
        "read_through": 12,
        "hit_rate": 0.75,
    },
    "bytes": {"fill": 49152000, "read_through": 1179648},
    "arena": {
        "bytes": 187 * 98304,
        "slots": 187,
        "slot_bytes": 98304,
        "expert_slots": 16,
        "kv_slots": 171,
        "free_slots": 0,
        "cells_per_layer": [4, 4, 4, 4],
        "cells_used": 15,
        "block_size": 16,
        "kv_pages": 1026,
        "kv_pages_used_peak": 9,
    },
    "kv": {
        "prefix_hit_tokens": 48,
        "session_hit_tokens": 7,
        "preemptions": 2,
        "swapped_out_bytes": 32768,
        "swapped_in_bytes": 16384,
    },
    "time": {
        "load_s": 0.31,
        "compile_s": 2.04,
        "prefill_s": 0.05,
        "decode_s": 0.32,
        "total_s": 2.8,
    },
    "steps": {"decode": 127, "prefill": 1},
    "placement": None,
    "cache_aware_routing": None,
    "notes": ["expert budget 25% = 16 of 64 experts (1.5 MiB)"],
}


def test_summary_reads_like_this():
    expected = """\
tokens   3 prompt, 128 generated, 398.4 tokens/s; first token 51.2 ms, then per token mean \
2.51 ms, p99 4.1 ms
experts  hit rate 75.0% of 2048 activations, 48 MiB moved, lru
arena    17.53 MiB: 16 slots of experts, 171 of KV (9 of 1026 pages at peak), 0 free
note     expert budget 25% = 16 of 64 experts (1.5 MiB)"""
    assert format_summary(STATS) == expected
