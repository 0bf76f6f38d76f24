"""What stands of a text is what stands in a run of three lines."""

from pathlib import Path

from tests.lines import by_folder, runs, standing

THEN = """def one(x):
    first = x + 1
    second = first * 2

    third = second - 3
    return third
"""


def test_lines_that_were_moved_and_indented_stand_and_others_do_not():
    then = {run: "old.py" for _, run in runs(THEN)}
    head = ["class Moved:", "    new = 0", ""]
    now = "\n".join([*head, *(f"    {line}" for line in THEN.splitlines()[:3])])
    assert standing(now, then) == {"old.py": 3}
    # The empty line within counts; a run that is broken off by a new line does not stand.
    assert standing(THEN, then) == {"old.py": 6}
    broken = THEN.replace("    second = first * 2\n", "    second = first\n")
    assert standing(broken, then) == {}


def test_every_folder_has_its_lines_and_those_of_files_of_then(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lines in (("s/a/one.py", 3), ("s/a/deep/two.py", 4), ("s/b/three.py", 5)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x\n" * lines)
    assert by_folder("s", {"s/a/deep/two.py": 4, "m/else.py": 9}) == {"s/a": (7, 4), "s/b": (5, 0)}
