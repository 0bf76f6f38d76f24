"""The account of a step: instructions by op, their time a step, XLA's own as one."""

import pytest

from scripts.cpu.step_account import by_op, op_names

PROGRAM = """\
%body {
  %ffi_call.1 = bf16[8] custom-call(%x), custom_call_target="moejax_cpu_linear", metadata={op_name="jit(run)/while/body/attend/ffi_call"}
  ROOT %ffi_call.2 = f32[8] custom-call(%x), custom_call_target="moejax_cpu_expert_ffn", metadata={op_name="jit(run)/while/body/ffi_call"}
  %add_fusion = f32[8] fusion(%x), kind=kLoop
}
ENTRY %main {
  %ffi_call.3 = f32[8] custom-call(%x), custom_call_target="moejax_cpu_linear", metadata={op_name="jit(run)/logits/ffi_call"}
}
"""  # noqa: E501  as XLA prints it


def test_a_head_is_apart_from_the_layers_products():
    assert op_names(PROGRAM) == {
        "ffi_call.1": "linear",
        "ffi_call.2": "expert_ffn",
        "ffi_call.3": "linear, once",
    }


def test_times_are_of_a_step_and_containers_are_not_counted_twice():
    found = [("ffi_call.1", 1.0)] * 4 + [("ffi_call.3", 6.0)] * 2 + [("add_fusion", 0.5)] * 4
    found += [("while.5", 99.0), ("ThunkExecutor::Execute", 99.0), ("end: ffi_call.1", 9.0)]
    ops = by_op(found, op_names(PROGRAM), steps=2)
    assert ops.pop("XLA's own") == pytest.approx((2, 1.0))
    assert ops == {"linear": pytest.approx((2, 2.0)), "linear, once": pytest.approx((1, 6.0))}
