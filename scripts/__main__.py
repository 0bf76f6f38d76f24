"""Lists the scripts: `python -m scripts`."""

from scripts.parts.commands import COMMANDS, listed

for group in COMMANDS:
    print(*listed(group), sep="\n", end="\n\n")
