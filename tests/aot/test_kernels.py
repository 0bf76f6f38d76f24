"""Every op's kernels at the sizes of real models, compiled for cards: they fit, do not spill, copy
nothing, and read weights, pages and records 128 bits at a time."""

import functools
import math
import re

import pytest

from moejax.evaluate.gpu_check import VERSIONS
from pallas_kernels.cards import shared_class
from pallas_kernels.expert_ffn.specs import CODED
from pallas_kernels.verification.check import argument_shapes
from pallas_kernels.verification.checks import WIDE_BYTES
from tests.aot.aot_h200 import CARDS, device_of
from tests.aot.cards import MODELS, OURS, compile_check, named, start_checks

pytestmark = pytest.mark.aot

MiB = 1 << 20

CONFIGURATIONS = {
    "Qwen3-30B-A3B": (
        *(f"linear 5120x2048 rows {rows} bias False out bfloat16" for rows in (16, 64)),
        "linear normed 5120x2048 bias False",
        "linear normed parts 128x2048",
        "rms_norm 2048",
        "combine 8x2048",
        "route 128 top 8 softmax normalize True",
        "route and list .* rows 32",
        "route scored and listed .* rows 16",
        "route and plan .* 128 cells rows 16",
        "plan 128 experts 32 cells",
        "truncate 151936 tokens",
        *(f"{op} 2304x2048" for op in ("fill", "stage", "move")),
        *(f"expert_ffn 2304x2048 silu top 8 tokens {n}" for n in ("192 rows 64", "16 rows 16")),
        "fill_ffn 2304x2048 silu top 8 combined tokens 16",
        "kv_write .*",
        *(f"paged_attention {of} heads .* window None" for of in ("decode", "prefill")),
        "paged_attention decode and write heads 32/4x128 block 16 window None",
    ),
    "DeepSeek-V2-Lite": (
        *(f"head_linear 16x128x512 rows {rows} transposed" for rows in (16, 64)),
        "latent_write .*",
        *(f"paged_attention {of} heads .*" for of in ("decode", "prefill")),
    ),
    "gpt-oss-20b": (
        r"paged_attention decode and write heads \S+ block \d+ window 128 sinks.*",
        "paged_attention prefill heads .* window 128 sinks",
    ),
    "Phi-3.5-MoE": ("layer_norm 4096", "route 16 top 2 sparsemixer .*"),
    "Qwen3-Next-80B-A3B": ("gated_delta .*",),
    "Kimi-Linear-48B-A3B": ("gated_delta .*",),
    "Nemotron-3-Nano-30B-A3B": ("selective_scan .*", "short_conv .*"),
    "DeepSeek-V3": ("route 256 top 8 sigmoid .* corrected",),
}
"""Names of start_checks: of each op one, of products and attention decode's and prefill's."""

LATER = ("DeepSeek-V3", "Kimi-Linear-48B-A3B", "Nemotron-3-Nano-30B-A3B")
"""Models whose kernels are compiled at night."""

BY_CLASS = r"linear 5120x2048 rows 16 .*|expert_ffn .* 16|fill_ffn.*|.* write heads 32/4x128 .*"
"""What .ci/run compiles for the card with the least shared memory too, one of each table for it."""

NARROW = r"route|plan|truncate_|stage$|tile_squares|.*merge|.*squares"
"""Kernels that read tables, lists, logits and sums."""

OF_CHECKPOINTS = tuple(((name, name),) for name in CODED)
"""Formats of checkpoints, as VERSIONS has ours."""

SPILLED = {"expert_gate_up": 64, "expert_gate_up_hits": 64, "prefill_attention": 64}
"""Most bytes that kernels may spill with 99 KiB: a block of 64 rows fills the registers with three
stages on compute capability 8.9, OLMoE's heads on both."""

SPILLED_BESIDE = {"expert_down_combine": 32, "plan": 32, "gated_delta": 96}
"""With any class, where a check has two numbers of rows, and with fewer cells than experts; no
kernel of a step spills where each expert may have a cell (test_steps). The parts of products of 16
tokens of a gated delta net fill the registers of some cards."""


def check_program(check, card, spilled=0, bits=128):
    """Compiles a check's kernels; spilled: bytes that they may, beside SPILLED; bits: of their
    widest loads."""
    program, kernels = compile_check(check, card)
    assert program.copies(min_bytes=64 * MiB) == program.host_copies(min_bytes=64 * MiB) == []
    if check.arena is not None:
        arena = argument_shapes(check)[0]
        assert program.memory.alias_bytes >= math.prod(arena.shape) * arena.dtype.itemsize
    if check.wide:
        assert program.memory.temp_bytes < WIDE_BYTES // 8
    kib = shared_class(device_of(card))
    own = {name: kernel for name, kernel in kernels.items() if OURS.match(name)}
    assert own
    for name, kernel in own.items():
        base = re.sub(r"__?\d+$", "", name)
        of_class = SPILLED.get(base, 0) if kib == 99 else 0
        of_class = max(of_class, SPILLED_BESIDE.get(base, 0))
        assert kernel.shared_bytes <= kib * 1024, name
        assert kernel.spill_bytes <= max(spilled, of_class), name
        assert kernel.registers <= 255, name
        assert max(kernel.load_bits()) >= bits or re.match(NARROW, name), name
        # The approximate instructions are wrong for angles of many turns.
        assert "cos.approx" not in kernel.ptx and "sin.approx" not in kernel.ptx, name
        if name.endswith("_write"):  # rounded where the reference rounds
            assert fused(kernel.ptx) == [], name
            if float(device_of(card).compute_capability) >= 9:
                assert "fma.rn.bf16" not in kernel.ptx, name
    return own


def fused(ptx):
    """The fma of bfloat16 that round a product and a sum at once. Below compute capability 9 a
    product is one that adds −0, and a sum one with a factor of ±1."""
    constants = dict(re.findall(r"mov\.b16\s+(%rs\d+), (\S+);", ptx))

    def is_alone(line):
        operands = re.match(r"fma\.rn\.bf16\s+%rs\d+, %rs\d+, (%rs\d+), (%rs\d+);", line)
        factor, added = map(constants.get, operands.groups()) if operands else (None, None)
        return factor in ("0x3F80", "0xBF80") or added == "0x8000"

    return [line for line in re.findall(r"fma\.rn\.bf16.*", ptx) if not is_alone(line)]


def test_an_fma_of_a_product_and_a_sum_is_told_from_one_of_either():
    alone = "mov.b16 %rs1, 0x8000;\nmov.b16 %rs2, 0xBF80;\n"
    alone += "fma.rn.bf16 %rs9, %rs3, %rs4, %rs1;\nfma.rn.bf16 %rs9, %rs3, %rs2, %rs5;\n"
    assert fused(alone) == []
    for both in ("fma.rn.bf16 %rs9, %rs3, %rs4, %rs5;", "fma.rn.bf16x2 %r9, %r3, %r4, %r5;"):
        assert fused(alone + both) == [both]


def cases():
    for model, names in CONFIGURATIONS.items():
        for name in names:
            for card in CARDS:
                least = card == "rtx4090" and re.fullmatch(BY_CLASS, name)
                always = model not in LATER and (card == "h200" or least)
                marks = [] if always else [pytest.mark.nightly]
                yield pytest.param(model, name, card, id=f"{model}-{name}-{card}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name", "card"), list(cases()))
def test_an_op_compiles_for_a_card(model, name, card):
    kernels = check_program(named(start_checks(card, model), name), card)
    text = "".join(kernel.ptx for kernel in kernels.values())
    if re.match(r"linear|head_linear|expert_ffn|paged_attention", name):
        tiles_of_64 = "rows 64" in name or name.startswith("paged_attention prefill heads .* w")
        assert ("wgmma.mma_async" in text) == (tiles_of_64 and card == "h200")
        assert "mma.sync" in text or "wgmma.mma_async" in text


@pytest.mark.slow
def test_arrays_beyond_4_GiB():
    (check,) = (c for c in start_checks("h200", MODELS[0]) if c.op == "fill" and c.wide)
    check_program(check, "h200")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "card"),
    [
        pytest.param(
            *(versions, card),
            id=f"{versions}-{card}",
            marks=[pytest.mark.nightly]
            * (card != "h200" or versions not in (VERSIONS[6], OF_CHECKPOINTS[0])),
        )
        for versions in (*VERSIONS, *OF_CHECKPOINTS)
        for card in CARDS
    ],
)
def test_records_of_every_format(versions, card):
    """expert_ffn's, and what fills them. Where bodies for records of different kinds share a
    kernel, or zeros are beside scales, a few values do not fit into registers."""
    mixed = len(versions) > 1 or "lossless12" in str(versions) or versions in OF_CHECKPOINTS
    for name in (
        r"expert_ffn .* tokens 192 rows 64",
        r"expert_ffn .* tokens 16 rows 16",
        "fill .*",
    ):
        check = named(start_checks(card, MODELS[0], versions), name)
        check_program(check, card, spilled=512 if mixed else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "card", [pytest.param(card, marks=[pytest.mark.nightly] * (card != "h200")) for card in CARDS]
)
def test_experts_of_gpt_oss(card):
    """MXFP4 with biases: 2880 columns are tiles of 16 codes at most; a few values are spilled."""
    for name in (
        r"expert_ffn .* swiglu 7 1.702 1 top 4 tokens 192 rows 64",
        r"expert_ffn .* combined tokens 32",
        r"fill_ffn .* tokens 16 rows 16",
    ):
        versions = (("fp4-32-e8m0", "fp4-32-e8m0"),)
        check = named(start_checks(card, "gpt-oss-20b", versions), name)
        check_program(check, card, spilled=64, bits=64 if "rows 64" in name else 128)


@pytest.mark.nightly
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_check_of_a_start(model, card):
    for check in start_checks(card, model):
        check_program(check, card)


@pytest.mark.slow
def test_a_class_of_gpu_changes_no_product():
    """Other stages, the same matrix instructions: a sum's order is that of every card."""
    name, found = "linear 151936x2048 rows 16 bias False out float32", {}
    for kib in (99, 227):
        check = named(start_checks("h200", MODELS[0], shared_kib=kib), name)
        kernels = compile_check(check, "h200")[1]
        found[kib] = [kernel for kernel in kernels.values() if kernel.name.startswith("linear")]
    products = functools.partial(re.findall, r"\bmma\.sync[\w.]*")
    small, large = ([products(kernel.ptx) for kernel in found[kib]] for kib in (99, 227))
    assert small == large != []
    assert max(k.shared_bytes for k in found[99]) < max(k.shared_bytes for k in found[227])
