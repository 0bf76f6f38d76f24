"""Which implementation runs: by name, never silently another."""

import importlib

import pytest

from pallas_kernels import OPS, Ops, dispatch, parse_ops, resolve_ops
from pallas_kernels.implementations import pick


def implementations(op):
    api = importlib.import_module(f"pallas_kernels.{op}.api")
    if op == "paged_attention":
        assert list(api.DECODE) == list(api.PREFILL) == list(api.IMPLEMENTATIONS)
    return api.IMPLEMENTATIONS


@pytest.mark.parametrize("op", OPS)
def test_the_list_of_ops_is_what_the_ops_have(op):
    assert tuple(implementations(op)) == OPS[op]
    assert importlib.import_module(f"pallas_kernels.{op}.specs").__doc__


def test_every_folder_is_a_listed_op(repository):
    folders = {path.parent.name for path in (repository / "pallas_kernels").glob("*/api.py")}
    assert folders == set(OPS) == set(Ops.__dataclass_fields__) - {"shared_kib"}


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
    ],
)
def test_refuses(ops, message):
    with pytest.raises(ValueError, match=message):
        resolve_ops(ops)


def test_one_name_is_for_every_op_that_has_it(monkeypatch):
    # What is made of others goes by theirs.
    assert parse_ops("pallas") == dict.fromkeys(OPS, "pallas") | {"fill_ffn": "auto"}
    monkeypatch.setitem(OPS, "latent_write", ("xla",))
    monkeypatch.setitem(OPS, "head_linear", ("xla",))
    wanted = parse_ops("pallas")
    assert {op: name for op, name in wanted.items() if "pallas" not in OPS[op]} == {
        "head_linear": "auto",
        "latent_write": "auto",
    }
    others = {op for op, names in OPS.items() if "pallas" in names} - {"fill_ffn"}
    assert {wanted[op] for op in others} == {"pallas"}
    with pytest.raises(ValueError, match="op 'latent_write' has no implementation 'pallas'"):
        parse_ops("latent_write=pallas")


def test_a_kernel_that_cannot_run_a_model_is_not_chosen():
    options = dict(platform="gpu", dtype="bfloat16", no_kernel={"paged_attention": "it is wide"})
    resolved = resolve_ops("auto", **options)
    assert resolved.paged_attention == "xla" and resolved.kv_write == "pallas"
    with pytest.raises(ValueError, match="op 'paged_attention': it is wide; use xla or auto"):
        resolve_ops("paged_attention=pallas", **options)


def test_a_class_of_gpu_is_kept_and_checked():
    assert resolve_ops(shared_kib=99).shared_kib == 99
    assert resolve_ops("xla", shared_kib=99).chosen() == dict.fromkeys(OPS, "xla")
    message = r"tables for \(99, 163, 227\) KiB a program, not 100"
    with pytest.raises(ValueError, match=message):
        resolve_ops(shared_kib=100)


def test_only_the_kernel_is_told_the_class():
    functions = {"xla": dict, "pallas": dict, "other": dict}
    told = {name: pick("linear", functions, name, 99)() for name in functions}
    assert told == {"xla": {}, "pallas": {"shared_kib": 99}, "other": {}}


def test_pick():
    assert pick("plan", {"xla": max, "other": min}, "other") is min
    with pytest.raises(ValueError, match="op 'plan' has no implementation 'no'; it has xla, other"):
        pick("plan", {"xla": max, "other": min}, "no")


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
