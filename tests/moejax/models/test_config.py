"""config.json: every field honoured or refused by name."""

import json
import types

import pytest

from moejax import LLM
from moejax.commands.main import main
from moejax.errors import UserError
from moejax.models.attention.grouped_query import reorders_heads
from moejax.models.config import load_config, parse_config
from moejax.models.family import later_layer
from moejax.models.model_config import ModelConfig, Run
from tests.moejax.models.families import write_checkpoint

BASE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}


def config(**fields) -> ModelConfig:
    return parse_config({**BASE, **fields})


def test_layers_and_runs():
    found = config(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert found.moe_layers == (False, True, False, False, False, True)
    assert found.runs == (Run(False, 0, 1), Run(True, 1, 1), Run(False, 2, 3), Run(True, 5, 1))
    assert config().runs == (Run(True, 0, 24),)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, None),
        ({"sliding_window": 64}, None),
        ({"use_sliding_window": True}, 4096),
        ({"use_sliding_window": True, "sliding_window": 64}, 64),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 24}, 4096),
        ({"layer_types": ["full_attention"] * 24}, None),
    ],
)
def test_sliding_window(fields, window):
    assert config(**fields).sliding_window == window


def test_published_dots_names_its_method_as_its_scores():
    dots = {"model_type": "dots1", "n_routed_experts": 8, "n_shared_experts": 2}
    dots |= {"num_experts_per_tok": 2}
    assert parse_config(dots | {"scoring_func": "noaux_tc"}) == parse_config(dots)


def test_architecture_by_model_type_alone():
    assert parse_config({"model_type": "qwen3_moe"}).architecture == "Qwen3MoeForCausalLM"


def compressed(table=None, /, **changed):
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, **changed}
    groups = {"config_groups": {"group_0": {"weights": weights}}, "format": "pack-quantized"}
    table = {"quant_method": "compressed-tensors", **groups, **(table or {})}
    return {"quantization_config": table}


def gptq(**changed):
    return {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, **changed}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' .*Qwen3MoeForCausalLM"),
        ({"model_type": "llama"}, "'llama' .*supported: Qwen3MoeForCausalLM"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures must be a list"),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type"),
        (compressed({"transform_config": {"config_groups": {"R3": {}}}}), "transform_config is"),
        (compressed({"moe_sparsity_config": {"layers": {}}}), "moe_sparsity_config is"),
        (compressed({"kv_cache_scheme": {"num_bits": 8}}), "kv_cache_scheme quantizes KV"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized with hqq.*bfloat16"),
        ({"quantization_config": {"quant_method": "awq"}}, "version is None"),
        (gptq(dynamic={"+:.*": {"bits": 8}}), "dynamic has other settings for some modules"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        (gptq(bits=3), "bits is 3"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_algo is None"),
        ({"quantization_config": {}}, "quantized with an unnamed method"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, -1]}},
            "weights in groups of -1, which is not supported",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "weight_block_size": [128, 128],
                    "activation_scheme": "static",
                }
            },
            "activation_scheme is 'static'",
        ),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "config_groups must be"),
        (compressed(symmetric="no"), "weights: symmetric is 'no', which is not supported"),
        (compressed(actorder="group"), "weights: actorder is 'group'"),
        (compressed(num_bits=3), "weights: num_bits is 3"),
        (compressed(group_size=0), "groups of 0"),
        (compressed(strategy="tensor"), "strategy is 'tensor'"),
        ({"hidden_size": "2048"}, "hidden_size must be an integer"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "must be a multiple of"),
        ({"head_dim": 33}, "head_dim must be even and positive, not 33"),
        ({"hidden_size": 12, "num_attention_heads": 4}, "hidden_size 12 // .*must be even"),
        ({"num_experts_per_tok": 9, "num_experts": 8}, r"num_experts_per_tok \(9\) exceeds"),
        ({"num_experts": 8, "num_local_experts": 16}, r"num_experts \(8\) contradicts"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "dtype .*contradicts torch_dtype"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"mlp_only_layers": list(range(24))}, "no layer has experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of integers"),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' .*silu"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a number"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be at least 1"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types must be 'full_attention'"),
        ({"eos_token_id": [1] * 1001}, "eos_token_id has 1001 token ids; at most 1000"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be at least 1"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be"),
    ],
)
def test_refusals_name_file_and_field(fields, message):
    with pytest.raises(UserError, match=f"^some.json: .*({message})"):
        parse_config({**BASE, **fields}, "some.json")


V2 = {"model_type": "deepseek_v2", "num_experts_per_tok": 6}
V3 = {"model_type": "deepseek_v3"}
GRANITE, ERNIE = {"model_type": "granitemoe"}, {"model_type": "ernie4_5_moe"}
GLM = {"model_type": "glm4_moe", "head_dim": 128}
LITE = {"model_type": "glm4_moe_lite", "num_hidden_layers": 2}
HYBRID = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 16}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
SLIDING = ["full_attention", "sliding_attention"] * 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok must be an integer, not None"),
        (V2 | LIMITED | {"n_group": None}, "n_group must be an integer"),
        (V2 | LIMITED | {"n_group": 7}, "router.*64 experts are not 7 groups"),
        (V2 | LIMITED | {"topk_group": 9}, "router.*top_groups is 9, there are 8 groups"),
        (V2 | LIMITED | {"num_experts_per_tok": 30}, "router.*top_k is 30, 3 groups have 24"),
        (V2 | {"topk_method": None}, "topk_method None is not implemented"),
        (V2 | {"routed_scaling_factor": 0}, "router.*scale must be a positive number"),
        (V3 | {"n_group": 256}, "router.*'top2' needs 2 experts in a group"),
        (V3 | {"norm_topk_prob": None}, "norm_topk_prob must be true or false"),
        (V3 | {"n_routed_experts": 8, "num_local_experts": 9}, "n_routed_experts .*contradicts"),
        (V3 | {"first_k_dense_replace": 61}, "no layer has experts .*61 of 61 layers"),
        (V3 | {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, not 63"),
        (V3 | {"v_head_dim": None}, "v_head_dim must be an integer"),
        (V3 | {"n_shared_experts": -1}, "n_shared_experts must be at least 0"),
        (
            V3 | {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim is not implemented for rope type 'linear'",
        ),
        (
            {"model_type": "mixtral", "rope_parameters": LONGROPE | {"short_mscale": 1.2}},
            "short_mscale and long_mscale are not implemented",
        ),
        (
            {"model_type": "mixtral", "rope_parameters": LONGROPE | {"short_factor": [1.0]}},
            "short_factor must have one number for each of 64 pairs .*not 1",
        ),
        (
            {"model_type": "phimoe", "rope_parameters": LONGROPE | {"short_mscale": 1.2}},
            "needs short_mscale and long_mscale",
        ),
        (
            {"model_type": "phimoe", "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope type 'yarn' of this model needs short_mscale",
        ),
        *(
            (GRANITE | {name: 0}, f"{name} must be above zero")
            for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
        ),
        (GRANITE | {"logits_scaling": -1}, "logits_scaling must be a number from zero up"),
        (GRANITE | {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) exceeds num_experts"),
        (GLM | {"head_dim": 42}, "partial_rotary_factor 0.5 of head_dim 42 .* not 21"),
        (GLM | {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 of .* not 1"),
        (ERNIE | {"moe_k": 3, "num_experts_per_tok": 4}, r"_tok \(4\) contradicts moe_k \(3\)"),
        (LITE | {"mlp_layer_types": [["dense"], "sparse"]}, "mlp_layer_types must be 'dense'"),
        (ERNIE | {"moe_k": 65}, r"moe_k \(65\) exceeds num_experts \(64\)"),
        (ERNIE | {"moe_layer_end_index": -2}, "moe_layer_end_index must be at least -1"),
        (ERNIE | {"moe_layer_interval": 29}, "no layer has experts .*moe_layer_interval 29"),
        ({"model_type": "phimoe", "router_jitter_noise": -1}, "router_jitter_noise must be"),
        ({"model_type": "olmoe", "clip_qkv": -1.0}, "clip_qkv must be a number from zero up"),
        (HYBRID | {"time_step_limit": [0, 10**400]}, "time_step_limit must be two numbers"),
        ({"model_type": "qwen2_moe", "layer_types": SLIDING}, "need use_sliding_window"),
        (
            {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": None},
            "need use_sliding_window and a sliding_window",
        ),
        (
            {"model_type": "mixtral", "architectures": ["PhiMoEForCausalLM"]},
            "'mixtral' contradicts the architecture PhimoeForCausalLM",
        ),
    ],
)
def test_refusals_of_other_families(fields, message):
    with pytest.raises(UserError, match=f"^some.json: .*{message}"):
        parse_config(fields, "some.json")


def test_kimi_k2_names_its_own_model_type():
    """Published beside the architecture of DeepSeek-V3, or alone."""
    fields = {"num_attention_heads": 64, "n_group": 1, "topk_group": 1}
    deepseek = parse_config({"model_type": "deepseek_v3", **fields})
    assert parse_config({"model_type": "kimi_k2", **fields}) == deepseek
    named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", **fields}
    assert parse_config(named) == deepseek


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, 64),
        ({"partial_rotary_factor": 0.25}, 32),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, 96),
        # As transformers writes it: its default beside the value that it reads.
        (
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
            },
            128,
        ),
    ],
)
def test_values_of_a_head_that_are_rotated(fields, rotated):
    config = parse_config(GLM | fields)
    assert config.rotary_dim == rotated and reorders_heads(config) == (rotated < 128)


def test_layers_of_ernie():
    layers = {"num_hidden_layers": 8, "moe_layer_start_index": 2, "moe_layer_interval": 2}
    first = (False, False, False, True)
    assert parse_config(ERNIE | layers).moe_layers == first + (False, True) * 2
    ends = parse_config(ERNIE | layers | {"moe_layer_end_index": 4})
    assert ends.moe_layers == first + (False,) * 4


def test_windows_make_no_runs():
    found = parse_config(
        {
            "model_type": "qwen2_moe",
            "num_hidden_layers": 6,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
            "mlp_only_layers": [5],
        }
    )
    assert found.windows == (9, None, 9, None, None, None)
    assert found.runs == (Run(True, 0, 5), Run(False, 5, 1))
    listed = parse_config(
        {"model_type": "qwen2_moe", "use_sliding_window": True, "layer_types": SLIDING}
    )
    assert listed.windows == (None, 4096) * 12


def test_end_of_sequence_id_of_the_family():
    """As transformers: the family's where the file says nothing, none where it says null."""
    assert parse_config({"model_type": "mixtral"}).eos_token_ids == (2,)
    assert parse_config({"model_type": "mixtral", "eos_token_id": None}).eos_token_ids == ()


def write(directory, name, value):
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (7, None, (7,)),
        (7, {"eos_token_id": [3, 4]}, (3, 4)),
        (7, {"eos_token_id": 5}, (5,)),
        ([1, 2], {}, (1, 2)),
        (None, None, ()),
        (7, {"eos_token_id": None}, (7,)),
    ],
)
def test_end_of_sequence_ids(tmp_path, own, generation, ids):
    write(tmp_path, "config.json", {**BASE, "eos_token_id": own})
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert load_config(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_files(tmp_path, name, text, message):
    write(tmp_path, "config.json", BASE)
    write(tmp_path, name, text)
    with pytest.raises(UserError, match=f"/{name}: {message}"):
        load_config(tmp_path)


def test_paths(tmp_path):
    with pytest.raises(UserError, match=r"config.json: no such file"):
        load_config(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: no such directory; expected a local directory"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not a directory; expected"):
        load_config(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot be opened \(File name too long\)"):
        load_config(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match=r"nothere.gguf: no such file; expected .* or a GGUF file"):
        load_config(tmp_path / "nothere.gguf")
    (tmp_path / "file").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(UserError, match=r"ends? in .gguf; rename it: mv (\S+/file) \1.gguf"):
        load_config(tmp_path / "file")


@pytest.mark.parametrize(("number", "later"), [("1", False), ("2", True), ("9" * 5000, False)])
def test_tensors_of_layers_after_the_last_one(number, later):
    """Python makes no integer of more than 4,300 digits."""
    config = types.SimpleNamespace(num_hidden_layers=2)
    assert later_layer(config, f"model.layers.{number}.mlp.gate.weight") is later


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("HunYuanMoEV1", {"rope_scaling": {"type": []}}, r"rope type \[\] is not implemented"),
        ("HunYuanMoEV1", {"rope_scaling": {"type": None, "rope_type": "yarn"}}, "rope type None"),
        (
            "HunYuanMoEV1",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
            "needs a head_dim above 2",
        ),
        (
            "HunYuanMoEV1",
            {"rope_theta": 10**400, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
            "rope_theta must be a number",
        ),
        ("Mistral4", {"rope_parameters": 5}, "rope_parameters must be"),
    ],
)
def test_malformed_rope_tables_are_refused_by_name(family, fields, message):
    with pytest.raises(UserError, match=message):
        parse_config({"architectures": [f"{family}ForCausalLM"], **fields})


def test_layers_that_share_an_indexer_s_choice_run_up_to_index_topk_tokens(tmp_path, capsys):
    sharing = dict(index_topk=64, index_topk_pattern="FSS")
    path = write_checkpoint(tmp_path / "model", "GlmMoeDsaForCausalLM", **sharing)
    why = "layers that share an indexer's choice run up to index_topk tokens, 64"
    with pytest.raises(UserError, match=f"max_model_len 65 .* longest sequence, 64: {why}; lower"):
        LLM(path, max_model_len=65, progress=False)
    assert main(["info", str(path)]) == 0
    assert f"sequences have at most 64 tokens: {why}" in capsys.readouterr().out
