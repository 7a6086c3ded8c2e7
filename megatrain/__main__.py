"""The command `megatrain`; `python -m megatrain` in a checkout is it as well, with nothing of ours installed."""

import sys

from megatrain import INTERRUPTED


def main() -> None:
    """What `megatrain.cli.main` does; an interrupt of what comes before a command, too, is told without a traceback."""
    try:
        from megatrain.cli import main as command

        command()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":  # a process that helps to plan may read this file, too
    main()
