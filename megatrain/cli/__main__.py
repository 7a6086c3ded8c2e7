"""`python -m megatrain.cli`."""

from __future__ import annotations

from megatrain.cli import main

if __name__ == "__main__":
    main()
