"""The claims table: every row says what was run, what came out, and what evidence that is."""

import re

import pytest

PAPERS = ("WiSP", "DynaExq", "FluxMoE", "fMoE (FineMoE)", "PreScope")
HEADS = ("claim", "in the paper", "run here", "here", "there", "verdict", "class")
VERDICTS = re.compile(
    r"supported|supported in part|contradicted|not testable here|not yet run \((#\d+|no issue)\)"
)
CLASSES = {
    "arithmetic",
    "generated routing",
    "small trained model",
    "measured on a CPU",
    "predicted",
    "measured on a GPU",
}
SAME = ("the same", "[below]")
"""How a row names a command that is written elsewhere: in the row before, or below the table."""


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """Paper → its rows, by heading."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        name, _, text = section.partition("\n")
        rows = [cells(line) for line in text.splitlines() if line.startswith("|")]
        heads, _, *rows = rows
        assert tuple(heads) == HEADS, name
        found[name] = [dict(zip(heads, row, strict=True)) for row in rows]
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def complaint(row: dict[str, str]) -> str:
    """What a row lacks, "" if nothing."""
    verdict, ran = row["verdict"], "`" in row["run here"] or row["run here"].startswith(SAME)
    kinds = set(row["class"].split(", "))
    if not VERDICTS.fullmatch(verdict):
        return f"no verdict: {verdict}"
    if kinds != {"none yet"} and not kinds <= CLASSES:
        return f"no class: {row['class']}"
    if not (row["claim"] and row["in the paper"] and row["there"]):
        return "it does not say what the paper claims, or where"
    if verdict.startswith("not testable"):
        if not re.search(r"\*\*Missing:\*\* .+ \*\*Smallest setup:\*\* .+", row["here"]):
            return "it names no missing quantity or no smallest setup"
        return "" if re.search(r"\d", row["there"]) else "no figure"
    if verdict.startswith("not yet"):
        return ""
    if not ran or not row["here"]:
        return "nothing was run for its verdict"
    return "a verdict needs a class" if kinds == {"none yet"} else ""


def test_every_claim_has_a_verdict_and_a_class(repository):
    found = tables((repository / "docs" / "results" / "claims.md").read_text())
    assert tuple(found) == PAPERS
    wrong = [
        f"{paper}: {row['claim']}: {why}"
        for paper, rows in found.items()
        for row in rows
        if (why := complaint(row))
    ]
    assert not wrong
    for paper, rows in found.items():
        assert not rows[0]["run here"].startswith("the same"), paper
        assert len(rows) >= 8, paper


def test_readers_find_the_table(repository):
    for page in ("README.md", "docs/results/findings.md", "docs/protocol.md"):
        assert "claims.md" in (repository / page).read_text(), page


GOOD = dict(zip(HEADS, ("c", "1", "`x`", "1", "2", "supported", "arithmetic"), strict=True))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"verdict": "not yet run (#21)", "run here": "–", "class": "none yet"}, ""),
        ({"verdict": "likely"}, "no verdict"),
        ({"verdict": "not yet run"}, "no verdict"),
        ({"class": "measured"}, "no class"),
        ({"class": "none yet"}, "needs a class"),
        ({"run here": "–"}, "nothing was run"),
        ({"in the paper": ""}, "or where"),
        ({"verdict": "not testable here", "here": "**Missing:** seconds."}, "no smallest setup"),
        (
            {
                "verdict": "not testable here",
                "here": "**Missing:** a. **Smallest setup:** b",
                "there": "A before B",
            },
            "no figure",
        ),
    ],
)
def test_what_a_row_lacks_is_found(changes, why):
    found = complaint({**GOOD, **changes})
    assert why in found and bool(found) == bool(why)
