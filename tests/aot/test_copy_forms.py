"""Which copies XLA lets run beside compute: what docs/kernels.md says of it."""

import re

import pytest

from tests.aot import copy_forms as forms

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def waits(thunks: str, kernel: str) -> bool:
    """Whether a kernel's launch waits for another one in its list."""
    (first,) = re.findall(rf"\[(source|prev)[^\]]*\] {kernel} grid", thunks)
    return first == "prev"


def test_kernels_on_one_arena_follow_each_other():
    program = forms.compiled(forms.one_arena)
    assert program.copies() == [] and program.graphs() == [True]
    assert waits(program.thunks, "copies") and not waits(program.thunks, "computes")


def test_kernels_on_two_buffers_do_not_wait():
    program = forms.compiled(forms.two_buffers)
    assert program.copies() == [] and program.graphs() == [True]
    assert not waits(program.thunks, "copies") and not waits(program.thunks, "computes")


@pytest.mark.parametrize(
    ("form", "one_graph", "copy"),
    [
        (forms.device_put_in_a_loop, False, "kCopy"),
        (forms.sliced_in_a_loop, False, "kDynamicSliceFusion"),
        (forms.chosen_in_a_loop, True, "wrapped_dynamic_slice"),
    ],
)
def test_copies_out_of_pinned_memory_are_asynchronous(form, one_graph, copy):
    """By an engine where the host knows the place, and then the loop is no graph."""
    program = forms.compiled(form)
    assert program.copies() == [] and (program.graphs() == [True]) == one_graph
    start = re.search(r"kAsyncStart.*\n.*", program.thunks)
    assert start is not None and copy in start[0]
    assert not waits(program.thunks, "computes")
