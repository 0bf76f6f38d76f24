"""Which implementation runs: by name, never silently another."""

import importlib

import pytest

from pallas_kernels import OPS, Ops, resolve_ops
from pallas_kernels.dispatch import pick


def implementations(op):
    api = importlib.import_module(f"pallas_kernels.{op}.api")
    if op == "paged_attention":
        assert list(api.DECODE) == list(api.PREFILL)
        return api.DECODE
    return api.IMPLEMENTATIONS


@pytest.mark.parametrize("op", OPS)
def test_the_list_of_ops_is_what_the_ops_have(op):
    assert tuple(implementations(op)) == OPS[op]
    assert importlib.import_module(f"pallas_kernels.{op}.specs").__doc__


def test_every_folder_is_a_listed_op(repository):
    folders = {path.parent.name for path in (repository / "pallas_kernels").glob("*/api.py")}
    assert folders == set(OPS) == set(Ops.__dataclass_fields__)


@pytest.mark.parametrize("ops", ["auto", "xla", {}, {"plan": "xla"}, {"plan": "auto"}])
def test_resolves(ops):
    assert resolve_ops(ops) == Ops(**dict.fromkeys(OPS, "xla"))


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("cuda", "op 'linear' has no implementation 'cuda'; it has xla"),
        ({"plan": "cuda"}, "op 'plan' has no implementation 'cuda'; it has xla"),
        ({"attention": "xla"}, "unknown op 'attention'; the ops are linear, rms_norm"),
    ],
)
def test_refuses(ops, message):
    with pytest.raises(ValueError, match=message):
        resolve_ops(ops)


def test_pick():
    assert pick("plan", {"xla": max, "other": min}, "other") is min
    with pytest.raises(ValueError, match="op 'plan' has no implementation 'no'; it has xla, other"):
        pick("plan", {"xla": max, "other": min}, "no")
