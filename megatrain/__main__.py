"""`python -m megatrain` in a checkout is the command `megatrain`, with nothing of ours installed."""

from megatrain.cli import main

if __name__ == "__main__":  # a process that helps to plan may read this file, too
    main()
