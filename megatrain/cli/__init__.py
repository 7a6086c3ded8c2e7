"""The command line: the one package that may import every other, each inside the subcommand that needs it.

A file holds a command, or a few that belong together; they are listed here in the order of the help text.
"""

from __future__ import annotations

import atexit
import errno
import functools
import inspect
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from megatrain import INTERRUPTED
from megatrain.cli import (
    adversary,
    compare,
    demo,
    diff,
    export,
    lists,
    plan,
    plan_adapters,
    profile,
    published,
    recordings,
    run,
    simulate,
    sweep,
    validate,
)
from megatrain.cli.asides import Asides
from schedules.errors import InputError, Refused

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a file that an error does not name: our own are named

app = typer.Typer(
    name="megatrain",
    help="See, prove, predict and run the schedules that train models far bigger than a GPU on one GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"megatrain {version('megatrain')}")
        except PackageNotFoundError:
            print("megatrain, from a checkout that is not installed")
        raise typer.Exit


VERSION = typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)


@app.callback()
def options(version: Annotated[bool, VERSION] = False) -> None:
    """What may stand before a command."""


COMMANDS = (
    simulate.simulate,
    simulate.build,
    simulate.verify,
    compare.compare,
    plan.plan,
    plan_adapters.plan_adapters,
    sweep.sweep,
    adversary.adversary,
    run.run,
    diff.diff,
    recordings.timeline,
    export.export,
    profile.profile,
    validate.validate,
    lists.models,
    lists.hardware,
    lists.policies,
    published.published,
    demo.demo,
)


def _help(command: Callable[..., None]) -> str:
    """A command's docstring without the line breaks of its source within paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n"))


def _not_silent(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which tells that it was interrupted where it has nothing of its own to say of that."""

    @functools.wraps(command)
    def told(**arguments: Any) -> None:
        try:
            command(**arguments)
        except KeyboardInterrupt:
            print(INTERRUPTED, file=sys.stderr)
            raise typer.Exit(130) from None

    return told


for command in COMMANDS:
    app.command(help=_help(command))(_not_silent(command))
app.command("import", help=_help(recordings.import_trace))(
    _not_silent(recordings.import_trace)
)  # a word of Python, which no function can have for a name


def main() -> NoReturn:
    """Run the command line; no traceback reaches a user for bad input.

    Exit codes: 0 done, 1 the answer is no (does not fit, does not verify), 2 wrong input, 130 interrupted.
    """
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Asides(sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    warnings.showwarning = _noted
    try:
        code = _code()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`head`, say) has closed the pipe: stay silent, also at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code == 130:
        # as Python ends, one more would show a traceback of where it was; whoever catches SystemExit hears it as before
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _open_what_is_closed() -> None:
    """A stream that a shell has closed (`>&-`) leads nowhere: a file of ours must not get its number, and what it is
    told.
    """
    for name in ("stdin", "stdout", "stderr"):  # each gets the lowest number that is free: its own
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w")
            for kept in (name, f"__{name}__"):  # the latter as Python has it, where another takes the former's place
                setattr(sys, kept, stream)


def _code() -> str | int | None:
    try:
        app()  # tells misspelt commands and options itself, and leaves with 2
    except SystemExit as left:
        return left.code
    except Refused as error:
        return _told(str(error), 1)
    except InputError as error:
        return _told(str(error), 2)
    except BrokenPipeError:
        raise
    except OverflowError as error:  # of numbers of hundreds of digits, which an option or a file may hold
        return _told(f"a number is too large: {error}", 2)
    except OSError as error:
        where = error.filename or ("cannot write what is printed" if error.errno in FULL else "")
        what = f"{where}: {error.strerror}" if where and error.strerror else str(error)
        return _told(what, 2)
    return 0


def _noted(message: Warning | str, *_where: Any, **_more: Any) -> None:
    """A warning without the place in the code that gave it, which tells a user nothing."""
    print(f"note: {message}", file=sys.stderr)


def _told(message: str, code: int) -> int:
    print(f"megatrain: {message}", file=sys.stderr)
    return code
