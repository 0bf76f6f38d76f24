"""Which implementation runs: by name, never silently another."""

import importlib

import jax.numpy as jnp
import pytest

from pallas_kernels import (
    OPS,
    Ops,
    dispatch,
    fill_ffn,
    paged_attention,
    parse_ops,
    resolve_ops,
    route,
)
from pallas_kernels.fill_ffn import pallas_triton as fill_ffn_kernels
from pallas_kernels.kv_write import KVPage
from pallas_kernels.records.versions import why_no_kernel
from pallas_kernels.route.specs import RULES
from tests.pallas_kernels.encoded import formats


def implementations(op):
    api = importlib.import_module(f"pallas_kernels.{op}.api")
    if op == "paged_attention":
        assert list(api.DECODE) == list(api.PREFILL) == list(api.IMPLEMENTATIONS)
    return api.IMPLEMENTATIONS


@pytest.mark.parametrize("op", OPS)
def test_the_list_of_ops_is_what_the_ops_have(op):
    assert tuple(implementations(op)) == OPS[op]
    assert importlib.import_module(f"pallas_kernels.{op}.specs").__doc__


@pytest.mark.parametrize("ops", ["auto", "xla", {}, {"plan": "xla"}, {"plan": "auto"}])
def test_resolves(ops, monkeypatch):
    monkeypatch.setattr(dispatch, "why_not_cpu", lambda: "they are not built")
    assert resolve_ops(ops) == Ops(**dict.fromkeys(OPS, "xla"))


def test_auto_is_native_on_a_cpu_that_has_the_library(monkeypatch):
    monkeypatch.setattr(dispatch, "why_not_cpu", lambda: None)
    want = {op: "cpu" if "cpu" in names else "xla" for op, names in OPS.items()}
    assert want["fill"] == "cpu" and want["layer_norm"] == "xla"
    assert resolve_ops("auto", dtype="bfloat16").chosen() == want
    assert resolve_ops("plan=xla").chosen() == want | {"plan": "xla"}
    assert set(resolve_ops("auto", dtype="float64").chosen().values()) == {"xla"}
    assert "cpu" not in resolve_ops("auto", platform="gpu", dtype="float32").chosen().values()


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("cuda", "op 'linear' has no implementation 'cuda'; it has xla"),
        ({"plan": "cuda"}, "op 'plan' has no implementation 'cuda'; it has xla"),
        ({"attention": "xla"}, "unknown op 'attention', did you mean 'paged_attention'"),
        ("linear=cpu", "op 'linear': the native CPU ops run on CPUs; here use"),
    ],
)
def test_refuses(ops, message):
    with pytest.raises(ValueError, match=message):
        resolve_ops(ops, platform="gpu", dtype="bfloat16")


def test_one_name_is_for_every_op_that_has_it():
    # What is made of others goes by theirs.
    kernels = {op: "pallas" if "pallas" in names else "auto" for op, names in OPS.items()}
    assert parse_ops("pallas") == kernels | {"fill_ffn": "auto"}
    native = {op: "cpu" if "cpu" in names else "auto" for op, names in OPS.items()}
    assert parse_ops("cpu") == native
    with pytest.raises(ValueError, match="op 'truncate' has no implementation 'cpu'"):
        parse_ops("truncate=cpu")


def test_a_kernel_that_cannot_run_a_model_is_not_chosen():
    options = dict(platform="gpu", dtype="bfloat16", no_kernel={"paged_attention": "it is wide"})
    resolved = resolve_ops("auto", **options)
    assert resolved.paged_attention == "xla" and resolved.kv_write == "pallas"
    with pytest.raises(ValueError, match="op 'paged_attention': it is wide; use xla or auto"):
        resolve_ops("paged_attention=pallas", **options)


def test_mosaic_runs_where_it_is_named_and_can(monkeypatch):
    options = dict(platform="gpu", dtype="bfloat16", no_mosaic={"linear": "it is narrow"})
    monkeypatch.setattr(dispatch, "why_not_mosaic", lambda: None)
    resolved = resolve_ops({"rms_norm": "mosaic"}, **options)
    assert (resolved.rms_norm, resolved.linear) == ("mosaic", "pallas")
    assert "rms_norm" in resolved.kernels() and not resolved.fuses_norm_route
    with pytest.raises(ValueError, match="op 'linear': it is narrow; use xla or auto"):
        resolve_ops("linear=mosaic", **options)
    for wrong, message in (
        ({"platform": "cpu"}, "Pallas kernels need an NVIDIA GPU"),
        ({"dtype": "float32"}, "Pallas kernels compute in bfloat16 or float16, not float32"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_ops("rms_norm=mosaic", **{**options, **wrong})
    monkeypatch.setattr(dispatch, "why_not_mosaic", lambda: "it is old")
    with pytest.raises(ValueError, match="'rms_norm': it is old; use pallas"):
        resolve_ops("rms_norm=mosaic", **options)


def test_a_class_of_gpu_is_kept_and_checked():
    assert resolve_ops(shared_kib=99).shared_kib == 99
    assert resolve_ops("xla", shared_kib=99).chosen() == dict.fromkeys(OPS, "xla")
    message = r"tables for \(99, 163, 227\) KiB a program, not 100"
    with pytest.raises(ValueError, match=message):
        resolve_ops(shared_kib=100)


def test_an_op_made_of_others_is_a_kernel_where_those_are():
    options = dict(platform="gpu", dtype="bfloat16")
    assert resolve_ops("auto", **options).fill_ffn == "pallas"
    assert resolve_ops("fill=xla", **options).fill_ffn == "xla"
    assert resolve_ops({"expert_ffn": "xla"}, **options).fill_ffn == "xla"
    assert resolve_ops({"fill": "xla", "fill_ffn": "pallas"}, **options).fill_ffn == "pallas"
    assert resolve_ops("fill_ffn=xla,plan=xla", **options).fill_ffn == "xla"
    options |= {"no_kernel": {"fill_ffn": "cells of two kinds"}}
    # A name for all ops is each op's own only where its kernel can run the model.
    for all_ops in ("auto", "pallas", parse_ops("pallas")):
        resolved = resolve_ops(all_ops, **options)
        assert (resolved.fill, resolved.expert_ffn, resolved.fill_ffn) == (
            "pallas",
            "pallas",
            "xla",
        )
    with pytest.raises(ValueError, match="op 'fill_ffn': cells of two kinds; use xla or auto"):
        resolve_ops("fill_ffn=pallas", **options)


def test_what_kernels_cannot_run_is_known_before():
    """The engine asks at its start; the ops say the same (tests/pallas_kernels/ops)."""
    page = KVPage(16, 2, 256)
    assert paged_attention.why_not_pallas(page) is None
    wider = page._replace(head_dim=258)
    assert "up to 256, not 258" in str(paged_attention.why_not_pallas(wider))
    for latent, rope, runs in ((512, 64, True), (513, 63, False), (512, 66, False)):
        why = paged_attention.why_not_pallas(KVPage(16, 1, latent + rope, latent))
        assert (why is None) == runs
        assert runs or f"up to 512 + 64 values, not {latent} + {rope}" in str(why)
    assert {route.why_not_pallas(rule) for rule in RULES.values()} == {None}
    many = route.why_not_pallas(route.RouteRule(1, groups=32))
    assert many == "the kernel takes at most 16 groups, not 32"


@pytest.mark.parametrize(
    ("version", "read"),
    [
        ("fp4-32-e8m0", True),
        ("fp4-16-e4m3divf32", True),
        ("int4-32-bf16+int4-32-bf16+int8-32-bf16", True),
        ("int4-32-bf16+int8-32-bf16+int4-32-bf16", False),
        ("int4+int4+dense", False),
        ("q8_0+q8_0+q6_k", False),
        ("q4_k", False),
    ],
)
def test_which_formats_kernels_read(version, read):
    found = why_no_kernel(("dense", version))
    assert set(found.values()) == (set() if read else {f"no kernel reads records of {version}"})


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ([("dense", "dense")], None),
        ([("int8", "int8"), ("int4", "int4")], None),
        ([("lossless12", "lossless12")], None),
        ([("dense", "dense"), ("int4", "int4")], "one view of the arena, dense or coded"),
        ([("dense", "lossless12")], "decoded on their way into a cell"),
    ],
)
def test_which_versions_fill_ffn_takes(versions, why):
    said = fill_ffn.why_not_pallas(versions)
    assert said is None if why is None else why in said
    names = [cell if cell == held else (cell, held) for cell, held in versions]
    operands = jnp.zeros((3, 64), jnp.bfloat16), formats(names, 64, 32, "bfloat16"), 16, 227
    if why is None:
        assert fill_ffn_kernels.configuration(*operands).copies == 32
        return
    with pytest.raises(ValueError, match=f"fill_ffn 'pallas': .*{why}.*; 'xla' takes it"):
        fill_ffn_kernels.configuration(*operands)
