"""What commands share: refusals, and lines as JSON or as text."""

import pytest

from host_offload.memory.budget import BudgetError
from moejax import UserError
from scripts.parts.commands import refusing
from scripts.parts.text_table import aligned, show


@pytest.mark.parametrize("error", [UserError("no"), BudgetError("no"), OSError("no")])
def test_what_a_user_can_change_is_said_in_a_line(capsys, error):
    @refusing(OSError)
    def main() -> int:
        raise error

    assert main() == 2
    assert capsys.readouterr().err.endswith(" test_parts: error: no\n")


def test_lines_are_json_or_text(capsys):
    show(True, [{"a": 1}, {"a": 2}], ["table"])
    show(False, [{"a": 1}], ["table"])
    assert capsys.readouterr().out == '{"a": 1}\n{"a": 2}\ntable\n'
    assert [*aligned((("ms", "{a:.1f}"),), [{"a": 10.0}, {"a": None}])] == ["  ms", "10.0", "   –"]
