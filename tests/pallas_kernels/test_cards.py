"""Classes of GPUs: which one a device is of, and that a class changes stages and nothing else."""

import dataclasses
import functools
import itertools
import types

import jax
import pytest

from pallas_kernels.cards import CLASSES, shared_class
from pallas_kernels.expert_ffn import pallas_triton as expert_ffn
from pallas_kernels.linear import pallas_triton as linear_kernel
from pallas_kernels.paged_attention import pallas_triton as attention
from tests.aot.aot_h200 import device_of


def gpu(**attributes):
    return types.SimpleNamespace(platform="gpu", device_kind="a GPU", **attributes)


@pytest.mark.parametrize(
    ("attributes", "kib"),
    [
        ({"shared_memory_per_block_optin": 99 << 10}, 99),
        ({"shared_memory_per_block_optin": (163 << 10) - 1}, 99),
        ({"shared_memory_per_block_optin": 163 << 10, "compute_capability": "9.0"}, 163),
        ({"shared_memory_per_block_optin": 227 << 10}, 227),
        ({"shared_memory_per_block_optin": 64 << 10}, 99),
        ({"compute_capability": "8.0"}, 163),
        ({"compute_capability": "8.6"}, 99),
        ({"compute_capability": "8.9"}, 99),
        ({"compute_capability": "9.0"}, 227),
        ({"compute_capability": "10.0"}, 227),
        ({"compute_capability": "12.0"}, 99),
        ({}, 99),
    ],
    ids=str,
)
def test_the_class_of_a_gpu(attributes, kib):
    assert shared_class(gpu(**attributes)) == kib


def test_what_interprets_kernels_has_the_largest_class():
    assert shared_class(jax.devices("cpu")[0]) == CLASSES[-1]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("card", "kib"), [("a100", 163), ("rtx4090", 99), ("h200", 227), ("rtx5060ti", 99)]
)
def test_the_class_of_a_described_card(card, kib):
    assert shared_class(device_of(card)) == kib


SIZES = (16, 96, 768, 1408, 2048, 2880, 4096, 14336)
CONFIGURATIONS = {
    "linear": [
        functools.partial(linear_kernel.configuration, rows, outputs, "bfloat16")
        for rows, outputs in itertools.product((16, 64), (8, 2048, 5120, 151936))
    ],
    "linear_parts": [
        functools.partial(linear_kernel.parts_of, outputs, inputs, "bfloat16")
        for outputs, inputs in itertools.product((8, 64, 128, 151936), (2048, 4096))
    ],
    "expert_ffn": [
        functools.partial(expert_ffn.configuration, d, i, "bfloat16", rows, versions)
        for d, i, rows, versions in itertools.product(
            SIZES, SIZES, (16, 64), ((), ("int4",), ("lossless12", "int8"))
        )
    ],
    "decode_attention": [
        functools.partial(attention.decode_configuration, groups, head_dim, "bfloat16")
        for groups, head_dim in itertools.product((1, 8, 20), (64, 128, 256))
    ],
    "prefill_attention": [
        functools.partial(attention.prefill_configuration, groups, head_dim, "bfloat16")
        for groups, head_dim in itertools.product((1, 8, 20), (64, 128, 256))
    ],
}
"""Every table by class; a kernel that gets one joins here."""


def without_stages(config):
    """A configuration as a dict, tiles within it too, less num_stages."""
    fields = dataclasses.asdict(config)

    def strip(value):
        if not isinstance(value, dict):
            return value
        return {key: strip(v) for key, v in value.items() if key != "num_stages"}

    return strip(fields)


@pytest.mark.parametrize("op", CONFIGURATIONS)
def test_a_class_changes_nothing_but_stages(op):
    """So the order of every sum, and the shape of every product, is that of any other card."""
    differ = False
    for configuration in CONFIGURATIONS[op]:
        found = [configuration(shared_kib=kib) for kib in CLASSES]
        assert without_stages(found[0]) == without_stages(found[1]) == without_stages(found[2])
        differ |= found[0] != found[2]
        assert configuration() == found[-1]
    assert differ  # else the table would be none


def kernels_in(jaxpr) -> set[tuple[str, int, int]]:
    """Name, warps and stages of every kernel that a program calls."""
    found = set()
    for equation in kernel_calls(jaxpr):
        parameters = equation.params["compiler_params"]
        found.add((equation.params["name"], parameters.num_warps, parameters.num_stages))
    return found


def kernel_calls(jaxpr):
    """The equations that call kernels, those of inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernel_calls(inner)
