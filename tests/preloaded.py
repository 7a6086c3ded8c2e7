"""What most commands import, imported once for all of them: the server from which they are forked imports this."""

from __future__ import annotations

import gc
import importlib
import io
import pkgutil
from contextlib import redirect_stderr, redirect_stdout, suppress
from unittest.mock import patch

import megatrain.cli

SOME = (
    *(f"megatrain.cli.{module.name}" for module in pkgutil.iter_modules(megatrain.cli.__path__)),
    *(f"megatrain.{name}" for name in ("cuda", "learning_rate", "neighbours", "pinned", "sanitizer", "session")),
    *(f"analysis.{name}" for name in ("buying", "compare", "sweep")),
    "torch.fx.experimental.symbolic_shapes",  # by the first backward, with all of sympy
    "pandas",
)
for name in SOME:
    importlib.import_module(name)
said, asked = io.StringIO(), patch("sys.argv", ["megatrain", "simulate", "tiny"])
with asked, redirect_stdout(said), redirect_stderr(said), suppress(Exception, SystemExit):
    # what else is imported where it is needed, such as scipy's optimizers; nothing here may begin threads, as torch
    # does when it computes, since a process that is forked has none
    megatrain.cli.main()
gc.collect()
gc.freeze()  # or every command would walk all of it
