"""Execution: the same schedule that was verified and simulated, run on memory, streams and a real model."""

INTERRUPTED = "megatrain: interrupted before it was done"
