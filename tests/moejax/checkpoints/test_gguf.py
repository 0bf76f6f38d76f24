"""GGUF files: their codes are paged, and mean what the gguf package says."""

from __future__ import annotations

import struct

import jax
import numpy as np
import pytest

from host_offload.policies.precision.precision_names import CHECKPOINT
from moejax import LLM, SamplingParams
from moejax.checkpoints.load import load_checkpoint
from moejax.errors import UserError
from moejax.models.gguf_config import FORMATS
from moejax.models.gguf_header import read_gguf
from pallas_kernels.records import decode
from tests.moejax.gguf_models import ARCHITECTURES, gguf_model
from tests.moejax.transformers_models import logprobs

pytestmark = pytest.mark.torch
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 6, 7, 30], list(range(20, 90))]
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "progress": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def run(path, **options):
    with LLM(path, dtype="float32", **LIMITS, **options) as llm:
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY)]
        return llm.stats(), [(o.token_ids, [*(o.logprobs or ())]) for o in outputs]


def leaves(loaded):
    found = jax.tree_util.tree_leaves_with_path(loaded.params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_weight_is_that_of_the_dequantized_checkpoint(family, directory):
    path = directory / f"{family}.gguf"
    gguf_model(path, family)
    found, wanted = (
        load_checkpoint(each, "float32") for each in (path, directory / f"{family}-dense")
    )
    first, second = (np.asarray(each.store.arrays["dense"]) for each in (found, wanted))
    assert np.array_equal(first, second)
    assert leaves(found).keys() == leaves(wanted).keys()
    for name, leaf in leaves(wanted).items():
        assert np.array_equal(leaves(found)[name], leaf), name


@pytest.mark.parametrize(("type_", "split"), [("Q4_0", 4), ("IQ4_NL", 0), ("MXFP4", 0)])
def test_records_mean_what_the_package_says(type_, split, tmp_path):
    gguf_model(tmp_path / "model.gguf", experts=type_, split=split)
    path = min(tmp_path.glob("*.gguf"))
    assert path.name.endswith(f"-of-{len([*tmp_path.glob('*.gguf')]):05}.gguf") == (split > 0)
    found = load_checkpoint(path, "float32", versions=(CHECKPOINT,)).store
    wanted = load_checkpoint(tmp_path / "model-dense", "float32").store
    assert [*found.arrays] == [FORMATS[type_]]
    records, dense = (np.asarray(*each.arrays.values()) for each in (found, wanted))
    for at in np.ndindex(records.shape[:2]):
        decoded = decode(records[at], found.layouts[FORMATS[type_]])
        assert np.array_equal(decoded, decode(dense[at], wanted.layouts["dense"])), at


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_tokens_and_logits_are_those_of_the_dequantized_model(family, directory):
    path = directory / f"{family}-run.gguf"
    model = gguf_model(path, family)
    stats, found = run(path)
    assert stats["precision"]["versions"] == ["q8_0"]
    for prompt, (tokens, chosen) in zip(PROMPTS, found, strict=True):
        wanted = logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        for each, token, row in zip(chosen, tokens, wanted, strict=True):
            assert token == row.argmax() and abs(each[token].logprob - row[token]) < 1e-4


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(shape=(32,), kind=0, offset=0, name=b"a") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


KEY = text(b"k")
HUGE = 1 << 60
HOSTILE = {
    "another file": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "empty": (b"", "more than there are"),
    "version 9": (header(version=9), "GGUF version 9 is not supported"),
    "big-endian": (header(version=3 << 24), "big-endian numbers is not supported"),
    "tensors without end": (header(tensors=HUGE), f"{HUGE} tensors; at most"),
    "keys without end": (header(keys=HUGE), f"{HUGE} keys; at most"),
    "long key": (header(keys=1, rest=struct.pack("<Q", HUGE)), f"a key of {HUGE} bytes"),
    "long text": (
        header(keys=1, rest=KEY + struct.pack("<IQ", 8, HUGE)),
        f"k of {HUGE} bytes; at most",
    ),
    "array without end": (
        header(keys=1, rest=KEY + struct.pack("<IIQ", 9, 8, HUGE)),
        f"k has {HUGE} values; at most",
    ),
    "nested arrays": (header(keys=1, rest=KEY + struct.pack("<IIQ", 9, 9, 3)), "array of type 9"),
    "unknown type": (header(keys=1, rest=KEY + struct.pack("<I", 77)), "k has type 77"),
    "a key twice": (header(keys=2, rest=(KEY + struct.pack("<IB", 0, 1)) * 2), "there twice"),
    "no axes": (header(tensors=1, rest=tensor(())), "tensor a has 0 axes"),
    "many axes": (header(tensors=1, rest=tensor((1,) * 9)), "tensor a has 9 axes"),
    "enormous shape": (header(tensors=1, rest=tensor((HUGE, HUGE))), "tensor a .*ends at byte"),
    "half a block": (header(tensors=1, rest=tensor((33,), 8)), "rows of 33 weights, and Q8_0"),
    "type 99": (header(tensors=1, rest=tensor(kind=99)), "tensor a is of type 99"),
    "beyond the file": (header(tensors=1, rest=tensor(offset=1 << 40)), "tensor a .*ends at byte"),
    "truncated": (header(tensors=1, rest=tensor((8,)) + bytes(20)), "tensor a .*ends at byte"),
    "one place for two": (
        header(tensors=2, rest=tensor() + tensor(name=b"b") + bytes(400)),
        "begins at 0, which is no place of its own",
    ),
    "not aligned": (header(tensors=1, rest=tensor(offset=1) + bytes(400)), "tensor a begins at 1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_before_memory_is_taken(case, tmp_path):
    data, message = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_uint32("qwen3moe.new_key", 3), "qwen3moe.new_key is 3, which is not supp"),
        (lambda w: w.add_uint32("qwen3moe.expert_gating_func", 2), "expert_gating_func is 2"),
        (lambda w: w.add_uint32("qwen3moe.rope.dimension_count", 6), "rope.dimension_count is 6"),
        (lambda w: w.add_float32("qwen3moe.expert_weights_scale", 2), "expert_weights_scale is 2"),
        (
            lambda w: w.add_float32("qwen3moe.rope.scaling.attn_factor", 1.5),
            "rope.scaling.attn_factor is 1.5",
        ),
        (lambda w: w.add_array("tokenizer.ggml.eos_token_id", [1, 2]), "eos_token_id must be"),
        (lambda w: w.kv_data[0].pop("qwen3moe.expert_used_count"), "expert_used_count is missing"),
        (lambda w: w.add_tensor(f"blk.{'9' * 5000}.x", np.ones(4, np.float32)), "blk.999.*is not"),
        (
            lambda w: w.add_string("qwen3moe.rope.scaling.type", "longrope"),
            "rope.scaling.type is 'longrope'",
        ),
        (lambda w: w.add_tensor("blk.0.what.weight", np.ones(4, np.float32)), "blk.0.what.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(edit, message, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, edit=edit)
    with pytest.raises(UserError, match=message):
        load_checkpoint(path)
