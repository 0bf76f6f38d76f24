"""Whole steps of known models with every op a kernel, compiled for cards: their launches, one CUDA
graph of a decode step, nothing of 1 MiB copied, everything in place."""

import collections
import re

import jax
import pytest

from moejax.step.compiled_step import LAYERS_A_TURN
from moejax.step.compiler import compiler_options
from moejax.step.programs import ProgramKey
from pallas_kernels.cards import shared_class
from tests.aot.aot_h200 import CARDS, compile_for, device_of
from tests.aot.cards import ALTERNATING, MODELS, OURS, compile_step, step_programs
from tests.aot.test_kernels import SPILLED
from tests.moejax.step.test_constant_memory import DECODE, PREFILL, STAGED, MiB, nbytes

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SHORT = ProgramKey("decode", 16, context=64)
"""Of 1024 tokens, where there may be 4096."""

FILLED = " expert_gate_up_hits expert_gate_up_filled expert_down_combine"
SORTED = " fill expert_gate_up_sorted expert_down_sorted combine"
ATTENTION = "norm_linear decode_attention_write_merge linear"
APART = "rms_norm linear decode_attention_write decode_attention_merge linear rms_norm linear_parts"
PREFILLED = "rms_norm linear kv_write prefill_attention linear rms_norm linear route plan"
LAYERS = {
    SHORT: ATTENTION + " norm_linear_parts route_plan" + FILLED,
    SHORT._replace(resident=True): ATTENTION
    + " norm_route_list expert_gate_up expert_down_combine",
    SHORT._replace(rows=32): ATTENTION + " norm_linear_parts route plan" + FILLED,
    DECODE: APART + " route plan" + FILLED,
    PREFILL: PREFILLED + SORTED,
}
"""Key → our kernels in a layer. Of published OLMoE q and k have norms of their own."""

LATENT = "linear linear linear linear linear latent_write head_linear head_linear rms_norm "
ATTENDED = LATENT + "decode_attention_latent_split decode_attention_latent_merge"
LATENT_LAYERS = {
    DECODE: ATTENDED + " rms_norm linear_parts route plan" + FILLED,
    SHORT._replace(context=None): ATTENDED + " norm_linear_parts route_plan" + FILLED,
    PREFILL: LATENT + "prefill_attention_latent rms_norm linear route plan" + SORTED,
}
"""The same of DeepSeek-V2-Lite's layers with experts: queries, latent, output, shared experts."""

SPILLED_BY_NEWER = 16 if jax.__version_info__ >= (0, 12) else 0
"""Most bytes that the kernels of a step may spill with the Triton of jax 0.12: four registers of
linear at 64 rows."""

GROUP_SLICES = 3
"""Launches of a layer that look up its place in a page, its group's block table and the pages of
new tokens, where the layers of one run have several groups of pages."""

WAVE = 11
"""Launches of one of a prefill layer's waves over its experts: plan, fill, gate_up and down, five
of XLA's that cut what is due into tiles, the loop's index and its condition."""

WAVE_AND_ONE = {(MODELS[0], "a100")}
"""Models and cards for which XLA makes two launches of one of these five."""

TEMP = {"decode": 48 * MiB, "prefill": 1100 * MiB}
"""Scratch beside arguments: decode at 64 rows; a prefill step of 8192 tokens, mostly the experts'
float32 outputs [8192, k, D] (512 MiB for top-8 of 2048) and hidden rows."""

LARGEST_COPY = {("DeepSeek-V2-Lite", "prefill"): 33 * MiB}
"""A prefill step with latent attention cuts the queries' two parts out of one product."""

ALWAYS = {
    *((MODELS[0], key, "h200") for key in (SHORT._replace(resident=True), PREFILL)),
    (ALTERNATING, SHORT, "h200"),
    (MODELS[0], STAGED, "rtx4090"),
}
"""Those that .ci/run compiles; rtx4090: the card with the least shared memory."""


def launches(thunks: str) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Kernels and copies by name, without XLA's numbers: of the loop over layers, all others."""
    inside, outside = collections.Counter[str](), collections.Counter[str]()
    for indent, kind, rest in re.findall(r"^( *)\d+: (k\w+)(.*)$", thunks, re.MULTILINE):
        if kind == "kCopy":
            name = "copy"
        elif kernel := re.search(r"(\S+) grid: ", rest):
            name = re.sub(r"__?\d+$", "", kernel[1])
        else:
            continue
        (inside if indent else outside)[name] += 1
    return inside, outside


def cases():
    keys = dict.fromkeys((*LAYERS, *LATENT_LAYERS, STAGED, DECODE._replace(resident=True)))
    for model in MODELS:
        for key in keys:
            for card in CARDS:
                marks = [] if (model, key, card) in ALWAYS else [pytest.mark.nightly]
                yield pytest.param(model, key, card, id=f"{model}-{key}-{card}", marks=marks)


@pytest.mark.parametrize(("model", "key", "card"), list(cases()))
def test_a_step_compiles_for_a_card(model, key, card):
    programs = step_programs(card, model)
    compiled, kernels = compile_step(card, programs, key)
    largest = LARGEST_COPY.get((model, key.kind), 0)
    assert [size for _, size in compiled.copies(MiB) if size > largest] == []
    assert compiled.host_copies(1) == compiled.host_copies(1, to_host=True) == []
    memory = compiled.memory
    assert memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert memory.host_temp_bytes == memory.host_output_bytes == 0
    assert memory.temp_bytes < TEMP[key.kind]

    inside, outside = launches(compiled.thunks)
    layers = (LATENT_LAYERS if model == MODELS[3] else LAYERS).get(key)
    if layers is not None and model != MODELS[2]:
        turn = LAYERS_A_TURN[key.resident] if key.kind == "decode" and model != MODELS[3] else 1
        own = {name: n for name, n in inside.items() if OURS.match(name)}
        assert own == {name: turn * n for name, n in collections.Counter(layers.split()).items()}
        if key.kind == "decode" and model != MODELS[3]:  # beside them the loop's condition
            slices = GROUP_SLICES * turn if model == ALTERNATING else 0
            assert inside["loop_dynamic_slice_fusion"] == slices
            assert inside.total() == turn * len(layers.split()) + slices + 1
            assert any("compare" in name for name in inside)
    assert outside["linear"] == outside["rms_norm"] == 1 or model == MODELS[3]  # of the logits
    if key.kind == "decode":
        # Launched once, the loop over layers within; a stage list is read behind each layer.
        assert (compiled.graphs() == [True]) != key.staged
        assert inside["copy"] == key.staged
    else:
        # Within the loop over layers one more step to the right: what each wave launches.
        wave = re.findall(r"^ {8}\d+: k\w+ .*?\] (\S+) grid:", compiled.thunks, re.M)
        assert {"plan", "fill", "expert_down_sorted"} < set(wave)
        assert len(wave) == WAVE + ((model, card) in WAVE_AND_ONE)
        assert not any("scatter" in name for name in wave)  # pairs are sorted once a layer

    kib = shared_class(device_of(card))
    for name, kernel in kernels.items():
        if OURS.match(name):
            assert kernel.shared_bytes <= kib * 1024, name
            spilled = SPILLED.get(re.sub(r"__?\d+$", "", name), 0) if kib == 99 else 0
            assert kernel.spill_bytes <= max(spilled, SPILLED_BY_NEWER), name


HYBRID_DECODE = ProgramKey("decode", 16)
MOE = " norm_linear_parts linear linear linear route plan" + FILLED
STATE = "norm_linear gated_delta_conv gated_delta rms_norm linear" + MOE
PAGED = "norm_linear rms_norm rms_norm decode_attention_write decode_attention_merge linear" + MOE
"""Our kernels in Qwen3-Next's layers: with states, and with pages; a shared expert has a gate."""


@pytest.mark.nightly
@pytest.mark.parametrize("card", ["h200", "rtx4090"])
def test_a_decode_step_of_layers_with_states(card):
    programs = step_programs(card, "Qwen3-Next-80B-A3B")
    compiled, kernels = compile_step(card, programs, HYBRID_DECODE)
    assert compiled.copies(MiB) == []
    assert compiled.host_copies(1) == compiled.host_copies(1, to_host=True) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert compiled.memory.temp_bytes < TEMP["decode"]
    assert compiled.graphs() == [True]
    inside, _ = launches(compiled.thunks)
    own = {name: n for name, n in inside.items() if OURS.match(name)}
    assert own == collections.Counter((f"{STATE} " * 6 + f"{PAGED} " * 2).split())
    of_states = {name: k for name, k in kernels.items() if name.startswith("gated_delta")}
    assert of_states and all(k.spill_bytes == 0 for k in of_states.values())


SAMPLED = {"sample_all": 6, "sample": 25}
"""Launches from logits to sampled tokens: the likeliest token, the distribution, its mass and the
draw; where tokens are left out two searches of 8 passes, each a launch."""


@pytest.mark.parametrize("kind", SAMPLED)
def test_sampling_is_few_launches(kind):
    key = ProgramKey(kind, 64)
    program = step_programs("h200", MODELS[0]).program(key)
    compiled = compile_for(
        "h200", program.function, *program.args, compiler_options=compiler_options("gpu", key)
    )
    inside, outside = launches(compiled.thunks)
    assert not inside and outside.total() <= SAMPLED[kind] + 2  # the tokens of other rows, results
    # Nothing is larger than the arrays of logits, draws and what is kept of them.
    assert compiled.memory.temp_bytes < 6 * 64 * 151936 * 4


def test_only_decode_steps_are_one_graph_and_the_user_may_say_otherwise(monkeypatch):
    graphs = "xla_gpu_enable_command_buffer"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert "WHILE" in compiler_options("gpu", DECODE)[graphs]
    assert graphs not in compiler_options("gpu", PREFILL) | compiler_options("cpu", DECODE)
    monkeypatch.setenv("XLA_FLAGS", f"--{graphs}=")
    assert graphs not in compiler_options("gpu", DECODE)
