"""What became of a folder's lines: `python -m tests.lines COMMIT FOLDER`.

Says of every file that FOLDER had in COMMIT how many of its lines stand in the packages and scripts
of today, and where. A line stands if it does so in a run of three lines that followed each other
then, whatever their indentation: what was renamed, moved or cut counts, what was written anew does
not. Then every folder below FOLDER of today, with its lines, those of whole files of which a fifth
or more is of then, and the rest, which came later. The last lines sum up, such files elsewhere too.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

RUN = 3
TREES = ("scripts", "moejax", "host_offload", "pallas_kernels")
SHARE = 0.2
"""Of a file whose lines are of then, so that it counts as what became of one."""

Runs = dict[tuple[str, ...], str]


def git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), check=True, capture_output=True, text=True).stdout


def runs(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(place, lines) of each run of RUN lines, empty lines and lone brackets left out."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines()) if len(line.strip()) > 3]
    for first in range(len(lines) - RUN + 1):
        chosen = lines[first : first + RUN]
        yield chosen[0][0], tuple(line for _, line in chosen)


def standing(text: str, then: Runs) -> Counter[str]:
    """File of then → lines of `text` that are its."""
    sources: dict[int, str] = {}
    places = [number for number, line in enumerate(text.splitlines()) if len(line.strip()) > 3]
    after = {place: i for i, place in enumerate(places)}
    for place, run in runs(text):
        if run in then:
            at = after[place]
            last = places[at + RUN - 1]
            sources |= dict.fromkeys(range(place, last + 1), then[run])
    return Counter(sources.values())


def main(commit: str, folder: str) -> Iterator[str]:
    then: Runs = {}
    lengths, elsewhere = {}, set()
    for name in git("ls-tree", "-r", "--name-only", commit).split():
        if not name.endswith((".py", ".yaml")) or name.startswith("tests/"):
            continue
        text = git("show", f"{commit}:{name}")
        if name.startswith(f"{folder}/"):
            lengths[name] = len(text.splitlines())
            then |= {run: name for _, run in runs(text)}
        else:
            elsewhere |= {run for _, run in runs(text)}
    then = {run: name for run, name in then.items() if run not in elsewhere}
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    whole = {}
    for path in (path for tree in TREES for path in sorted(Path(tree).rglob("*.py"))):
        text = path.read_text()
        mine = standing(text, then)
        for source, count in mine.items():
            found[source][str(path)] += count
        if text and sum(mine.values()) >= SHARE * len(text.splitlines()):
            whole[str(path)] = len(text.splitlines())
    for name, length in sorted(lengths.items()):
        where = ", ".join(f"{path} {n}" for path, n in found[name].most_common() if n > 5)
        yield f"{name}  {length} → {found[name].total()}  {where or 'gone'}"
    for name, (lines, kept) in sorted(by_folder(folder, whole).items()):
        yield f"{name}  {lines} lines today, {kept} in files of then, {lines - kept} later"
    total, stand = sum(lengths.values()), sum(each.total() for each in found.values())
    yield f"{total} lines then, of which {stand} stand ({stand / total:.0%})"
    yield f"{len(whole)} files of which a fifth is of then, {sum(whole.values())} lines in all"


def by_folder(folder: str, whole: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Folder right below `folder` → its lines of today, and those of the files in `whole`."""
    found: dict[str, tuple[int, int]] = {}
    for path in Path(folder).rglob("*.py"):
        lines, kept = found.get(name := "/".join(path.parent.parts[:2]), (0, 0))
        found[name] = lines + len(path.read_text().splitlines()), kept + whole.get(str(path), 0)
    return found


def command(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python -m tests.lines COMMIT FOLDER")
    print(*main(*arguments), sep="\n")


if __name__ == "__main__":
    command(sys.argv[1:])
