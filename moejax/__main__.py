"""``python -m moejax``: the same as the command ``moejax``."""

from moejax.commands.main import run

if __name__ == "__main__":
    run()
