"""The command ``moejax``, and ``python -m moejax``."""

from moejax.interrupt import leave_quietly


def run() -> None:
    """Runs the command and ends the process."""
    leave_quietly()
    from moejax.commands.main import run as run_command

    run_command()


if __name__ == "__main__":
    run()
