"""Policies by name or by path: each file of this folder holds one `policy`, and so may any file of yours.

A policy is `policy(model, workload, memory, *, knobs...) -> Program`. Its module's docstring is its help, its
keyword-only parameters are its knobs: what the command line offers and `--vary` varies. The planner searches those of
`streamed` alone. A file says what it trains, `TRAINS = "adapters"` or "nothing", where that is not all weights.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from schedules import fp8, kept_activations
from schedules.asked import another_step
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.most_ops import require_few_ops
from schedules.program import Program
from schedules.schedule import Knob, Schedule
from schedules.words import nearest, plain
from schedules.workload import MemoryBudget, Workload

Policy = Callable[..., Program]

_FOLDER = Path(__file__).parent
_ENDS = re.compile(r"^.+?\.py(?=\s)")  # a file, where knobs follow it
_KNOB_TYPES = (bool, int, float, str, NoneType)


class PolicyError(InputError):
    """There is no such policy or knob, a knob has a wrong value, or a policy file fails."""


def names() -> list[str]:
    """The policies of this package, sorted."""
    return list(_names())


@functools.cache  # every schedule that is built asks for them
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.py") if not path.stem.startswith("_")))


def comparable() -> list[str]:
    """Those that train all weights, sorted: what they do in a step can be compared."""
    return [name for name in names() if trains(name) == "weights"]


def trains(name_or_path: str | Path) -> str:
    """What a policy trains: "weights", "adapters" or "nothing", as its file's TRAINS says. Raises PolicyError."""
    return _trains(_module(name_or_path))


def require_alike(trained: Mapping[str, str]) -> None:
    """Raises InputError unless all policies train the same; `trained` says what by how they were named."""
    first = next(iter(trained))
    for name, what in trained.items():
        if what != trained[first]:
            raise InputError(f"{first} trains {trained[first]} and {name} trains {what}: name some that do the same")


def require_apart(names: Sequence[str]) -> None:
    """Raises InputError where two of these policies, which may have knobs behind them, are files called alike."""
    files: dict[str, str] = {}
    for name in dict.fromkeys(with_knobs(text)[0] for text in names):
        if (other := files.setdefault(short(name), name)) != name and not Path(other).samefile(name):
            raise InputError(f"{other} and {name} are called alike, and no result could tell them apart: rename one")


def load(name_or_path: str | Path) -> Policy:
    """The policy of that name, or of a Python file. Raises PolicyError."""
    return _policy(_module(name_or_path))


def summary(name_or_path: str | Path) -> str:
    """What a policy does in one line, "" where its file does not say. Raises PolicyError."""
    text = inspect.getdoc(_module(name_or_path)) or ""
    return text.partition("\n")[0]


def explain(name_or_path: str | Path) -> str:
    """A policy's help: what its file says it does, and its knobs. Raises PolicyError."""
    module = _module(name_or_path)
    function, where = _policy(module), short(name_or_path)
    text = inspect.getdoc(module) or f"{where}: its file does not say what it does."
    lines = []
    meanings = _meanings(function, name_or_path)
    for name, knob in _knobs(function, where).items():
        default = "" if knob.default is knob.empty else f" = {str(knob.default).lower()}"
        lines.append(f"  {name}{default}  ({_expected(knob)})")
        if name in meanings:
            lines.append(f"      {meanings[name]}")
    return "\n".join([text, "", "Knobs:", *lines]) if lines else f"{text}\n\nNo knobs."


def knob_help(name_or_path: str | Path) -> dict[str, tuple[str, str]]:
    """What each knob of a policy accepts, and what it means, "" where its file does not say. Raises PolicyError."""
    function = load(name_or_path)
    meanings = _meanings(function, name_or_path)
    known = _knobs(function, short(name_or_path))
    return {name: (_expected(knob), meanings.get(name, "")) for name, knob in known.items()}


def knobs(name_or_path: str | Path) -> dict[str, inspect.Parameter]:
    """A policy's knobs in its own order, each with its default and its resolved annotation.

    The annotation is bool, int (a count, never negative), float, str, Literal of strings, None, or a union of
    these; a parameter that has none is of its default's type. Raises PolicyError.
    """
    return dict(_knobs(load(name_or_path), short(name_or_path)))


def parse_knobs(name_or_path: str | Path, settings: Sequence[str]) -> dict[str, Knob]:
    """Knobs from the command line: "slots=3", "overlap_comm=false", "keep=none".

    Raises:
        PolicyError: a setting is not of the form name=value, names no knob, or has a value of a wrong type.
    """
    known = knobs(name_or_path)
    parsed: dict[str, Knob] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise PolicyError(f"{setting!r} is not of the form knob=value")
        name = name.strip().replace("-", "_")
        _must_know(name, known, short(name_or_path))
        if name in parsed:
            raise PolicyError(f"knob {name} is set twice")
        parsed[name] = _parse(name, text.strip(), known[name])
    return parsed


def with_knobs(text: str, more: Sequence[str] = ()) -> tuple[str, dict[str, Knob]]:
    """A policy and the knobs that follow it: "streamed nvme=4"; and `more`. Raises as `parse_knobs` does."""
    # a path may have spaces in it
    path = text if Path(text).is_file() else next((p for p in _ENDS.findall(text) if Path(p).is_file()), None)
    name, *settings = text.split() or [text] if path is None else [path, *text.removeprefix(path).split()]
    return name, parse_knobs(name, [*settings, *more])


def build(
    name_or_path: str | Path, model: ModelSpec, workload: Workload, memory: MemoryBudget, /, **values: Knob
) -> Schedule:
    """The schedule that a policy makes of a step; its knobs, of any name, are those given and defaults of the others.

    Raises:
        PolicyError: there is no such policy or knob, a value has a wrong type, or the policy fails, computes another
            step than this one, or trains something else than its file says.
        ModelError: the model's blocks do not have the step's mode of recompute, products or length.
    """
    return _built(name_or_path, model, workload, memory, values, waits=True)


def build_without_waits(
    name_or_path: str | Path, model: ModelSpec, workload: Workload, memory: MemoryBudget, /, **values: Knob
) -> Schedule:
    """As `build`, in half the time: to count bytes and ops, not to run."""
    return _built(name_or_path, model, workload, memory, values, waits=False)


def _built(
    name_or_path: str | Path,
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    values: Mapping[str, Knob],
    *,
    waits: bool,
) -> Schedule:
    module, where = _module(name_or_path), short(name_or_path)
    function = _policy(module)
    known = _knobs(function, where)
    for name, value in values.items():
        _must_know(name, known, where)
        _check(f"knob {name}", value, known[name])
    missing = [name for name, knob in known.items() if knob.default is knob.empty and name not in values]
    if missing:
        raise PolicyError(f"{where}: knob {missing[0]} has no default; give it a value")
    chosen = {name: values.get(name, knob.default) for name, knob in known.items()}
    model.require_recompute(workload.recompute)
    fp8.require(model, workload)
    model.require_length(workload.seq_len)
    with _Blame(name_or_path, values), redirect_stdout(sys.stderr):  # stdout is for results, such as --json
        require_few_ops(model, workload)
        program = function(model, workload, memory, **chosen)
        if not isinstance(program, Program):
            raise TypeError(f"policy() returned {type(program).__name__}, not a Program")
        schedule = program.build(policy=where, knobs=chosen, waits=waits)
    if differs := another_step(schedule, model, workload):
        raise PolicyError(f"{where} computes another step: {differs}")
    if (trained := schedule.workload.trains) != (told := _trains(module)):  # it would be compared with others
        what = f"{where} trains {trained} and counts as a policy that trains {told}"
        raise PolicyError(f'{what}: add TRAINS = "{trained}" to its file')
    return schedule


def changed(schedule: Schedule) -> list[str]:
    """The knobs that its policy was given other values for than its defaults: "slots=3"; all, of a policy of a file."""
    ours = knobs(schedule.policy) if schedule.policy in names() else {}
    known = {name: knob.default for name, knob in ours.items()}
    return [f"{name}={value}" for name, value in schedule.knobs.items() if name not in known or value != known[name]]


# ---- files


def _module(name_or_path: str | Path) -> ModuleType:
    name, path = str(name_or_path), Path(name_or_path)
    if name in names():
        return importlib.import_module(f"{__name__}.{name}")
    if path.suffix != ".py" and len(path.parts) <= 1:
        raise PolicyError(f"no policy is called {name!r}; {_nearest(name, names())}, or give the path of a .py file")
    if not path.is_file():
        raise PolicyError(f"{path} is a folder" if path.is_dir() else f"there is no file {path}")
    if path.suffix == ".py" and path.stem in names() and not path.samefile(_FOLDER / path.name):
        raise PolicyError(f"{path} is called as a policy of ours is, and no result could tell them apart: rename it")
    spec = importlib.util.spec_from_file_location(f"policy_{path.stem}", path)
    if spec is None:
        raise PolicyError(f"{path} is not a Python file; a policy's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses of the file look up their annotations
    with _Blame(path), redirect_stdout(sys.stderr):
        # the loader would run what it has kept of a file that has been edited since to the same size within a second
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return module


def _trains(module: ModuleType) -> str:
    return str(getattr(module, "TRAINS", "weights"))


def _policy(module: ModuleType) -> Policy:
    function = getattr(module, "policy", None)
    if not inspect.isfunction(function):
        raise PolicyError(f"{module.__file__} defines no function policy(model, workload, memory, *, knobs...)")
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 3:
        raise PolicyError(
            f"{module.__file__}: policy() takes {len(positional)} positional parameters; it must take "
            "model, workload, memory, and its knobs after a *"
        )
    return function


def short(name_or_path: str | Path) -> str:
    """What a policy's schedules call it: its name, or that of its file."""
    return plain(Path(name_or_path).stem)


class _Blame:
    """Turns whatever a policy's code raises into a PolicyError.

    It names the file and line, but for what a policy of ours refuses: that is about the model, the step or a knob.
    """

    def __init__(self, name_or_path: str | Path, values: Mapping[str, Knob] | None = None) -> None:
        self._name, self._values = str(name_or_path), values or {}
        self._ours = self._name in names()
        self._file = _FOLDER / f"{self._name}.py" if self._ours else Path(name_or_path)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (Exception, SystemExit)):  # Ctrl-C is the user's
            return
        if self._ours and isinstance(error, InputError):
            raise PolicyError(f"{self._name}: {self._of_knobs(str(error))}") from error
        line: int | None = error.lineno if isinstance(error, SyntaxError) else None
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).resolve() == self._file.resolve():
                line = frame.lineno
        at = f"{self._file}:{line}" if line is not None else str(self._file)
        # what a SyntaxError says of itself ends in its place once more
        what = error.msg if isinstance(error, SyntaxError) else error
        raise PolicyError(f"{at}: {type(error).__name__}" + (f": {what}" if str(what) else "")) from error

    def _of_knobs(self, text: str) -> str:
        """The text after the knobs that were given, unless it speaks of them."""
        given = [f"{name}={value}" for name, value in self._values.items()]
        return text if not given or any(name in text for name in self._values) else f"{', '.join(given)}: {text}"


# ---- knobs


@functools.lru_cache(maxsize=64)  # a search builds hundreds of schedules of one policy; annotations are evaluated
def _knobs(function: Policy, where: str) -> Mapping[str, inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # annotations are expressions of the policy's author
        raise PolicyError(f"{where}: the annotations of policy() cannot be read: {error}") from error
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise PolicyError(f"{where}: policy() takes {parameter}; name its knobs one by one")
        if parameter.kind != parameter.KEYWORD_ONLY:
            continue
        if parameter.annotation is parameter.empty:
            default = parameter.default
            parameter = parameter.replace(annotation=str if default is parameter.empty else type(default))
        if not all(o in _KNOB_TYPES or isinstance(o, str) for o in _options(parameter.annotation)):
            raise PolicyError(
                f"{where}: knob {name} is annotated {_type_name(parameter.annotation)}; "
                "a knob is of bool, int, float, str, None, or a Literal of strings"
            )
        if parameter.default is not parameter.empty:
            _check(f"{where}: the default of knob {name}", parameter.default, parameter)
        found[name] = parameter
    return found


def _meanings(function: Policy, name_or_path: str | Path) -> dict[str, str]:
    """What arguments mean. Of knobs that many of ours have it is said once for all, unless the file says otherwise."""
    shared = kept_activations.KNOBS if str(name_or_path) in names() else {}
    known = "|".join(inspect.signature(function).parameters)
    # in the Args section, however far indented: from a name to the next, or to where nothing is indented
    argument = re.compile(rf"^ +({known}): (.+(?:\n(?! +(?:{known}): ) +\S.*)*)", re.MULTILINE)
    told = shared | dict(argument.findall(inspect.getdoc(function) or ""))
    return {name: " ".join(text.split()) for name, text in told.items()}


def _options(annotation: Any) -> list[Any]:
    """What a knob may be: types, and the strings of a Literal."""
    if get_origin(annotation) in (Union, UnionType, Literal):
        return [option for part in get_args(annotation) for option in _options(part)]
    return [NoneType if annotation is None else annotation]


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _expected(knob: inspect.Parameter) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: "none"}
    return " or ".join(words.get(o) or repr(o) for o in _options(knob.annotation))


def _check(what: str, value: Knob, knob: inspect.Parameter) -> None:
    options = _options(knob.annotation)
    if isinstance(value, str):
        good = str in options or value in options
    else:  # a whole number will do for a number; a bool is never a number
        good = type(value) in options or (type(value) is int and float in options)
    if not good:
        raise PolicyError(f"{what} must be {_expected(knob)}, not {value!r}")
    if type(value) is int and value < 0:
        raise PolicyError(f"{what} must be at least 0, not {value}")
    if type(value) is float and not math.isfinite(value):
        raise PolicyError(f"{what} must be finite, not {value}")
    if isinstance(value, str) and plain(value) != value:  # which no file of the schedule could have
        raise PolicyError(f"{what} must be text that can be shown, not {value!r}")


def _parse(name: str, text: str, knob: inspect.Parameter) -> Knob:
    """The value that `text` spells, by the first of the knob's types that can read it."""
    options = _options(knob.annotation)
    value: Knob = text
    if NoneType in options and text.lower() == "none":
        value = None
    elif bool in options and text.lower() in ("true", "false"):
        value = text.lower() == "true"
    else:
        for number in (int, float):
            if number in options and isinstance(value, str):
                with suppress(ValueError):
                    value = number(text)
    _check(f"knob {name}", value, knob)
    return value


def _must_know(name: str, known: Mapping[str, object], where: str) -> None:
    if name not in known:
        raise PolicyError(f"{where} has no knob {name!r}; {_nearest(name, list(known))}")


def _nearest(name: str, known: Sequence[str]) -> str:
    if near := nearest(name, known):
        return f"nearest: {', '.join(near)}"
    return f"there are: {', '.join(known)}" if known else "there are none"
