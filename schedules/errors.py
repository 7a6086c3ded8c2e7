"""The two ways in which an answer is not what was hoped for; the command line's exit codes follow from them."""

from __future__ import annotations


class InputError(ValueError):
    """What was given is wrong: a name, a number, a file. Exit code 2."""


class Refused(ValueError):
    """The question is sound and the answer is no: it does not fit, or is not safe. Exit code 1."""


class ProgramError(InputError):
    """A policy asked for something that its own program makes impossible, such as a tensor that is nowhere."""
