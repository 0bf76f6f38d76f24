"""Each planted mistake of a paper's mechanism is found by its test."""

import pytest

from moejax import UserError
from scripts.check.mutants import Mutant, fails, main, mutants, try_out
from tests.conftest import REPOSITORY


def test_each_can_be_planted_and_names_a_test(capsys):
    found = mutants()
    assert len({each.of for each in found}) == len(found) > 40
    for each in found:
        assert each.text(REPOSITORY) != (REPOSITORY / each.file).read_text()
        path, _, name = each.test.partition("::")
        assert (REPOSITORY / path).exists(), each.test
        assert not name or f"def {name}(" in (REPOSITORY / path).read_text(), each.test
    assert main(["--list", "--only", "dali"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["--only", "no such word"]) == 2


@pytest.mark.slow
def test_a_mistake_is_planted_and_taken_out_again(tmp_path):
    (tmp_path / "own.py").write_text("def two():\n    return 2\n")
    test = "import own\n\n\ndef test_two():\n    assert own.two() == 2\n"
    (tmp_path / "test_own.py").write_text(test)
    wrong = Mutant("two is two", "own.py", "return 2", "return 3", "test_own.py::test_two")
    same = wrong._replace(of="nothing", new="return 1 + 1")
    assert fails(tmp_path, 60, "test_own.py") is False
    rows = try_out([wrong, same], tmp_path, 60)
    assert [row["found"] for row in rows] == ["yes", "NO"]
    (late,) = try_out([wrong._replace(new="while True:\n        pass")], tmp_path, 1)
    assert late["found"] == "LATE"
    assert "return 2" in (tmp_path / "own.py").read_text()
    with pytest.raises(UserError, match="has 'return 4' 0 times"):
        wrong._replace(old="return 4").text(tmp_path)
    with pytest.raises(UserError, match="pytest missing"):
        fails(tmp_path, 60, "missing.py")


@pytest.mark.nightly
def test_each_is_found(capsys):
    """Minutes: each runs its test in a process of its own."""
    assert main([]) == 0, capsys.readouterr().out
