"""A page per policy: what its file says, and what follows from the schedule it builds.

All of a page but its words is computed: bytes from the schedule's buffers, times by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from analysis.tables import markdown_line
from analysis.text_gantt import SMALL, legend, text_gantt
from schedules import policies, presets
from schedules.files import write_text
from schedules.op import Tier
from schedules.schedule import Knob
from schedules.tensor import LAYER_CLASSES
from schedules.verify import verify
from schedules.workload import Workload
from sim import hardware
from sim.prediction import CLASS_NAMES, Prediction, contents, memory_of, predict
from sim.units import rate, seconds

MACHINE = "h200"
NUMBERS_MODEL, PICTURE_MODEL, PICTURE_BLOCKS = "qwen2.5-7b", "llama-2-7b", 6
STEP = Workload(micro_batch_size=16, seq_len=1024)
YARDSTICK = "streamed"
COMMAND = "megatrain policies --out docs/policies"
OVERVIEW = "all.png"
IN_PARAMETERS = ("max_live", "sub_group_size", "reduce_bucket_size")  # knobs that count them
_SCALE = 3  # the picture of all cuts steps longer than this many of the yardstick's
_DPI = 100
_STATES = frozenset(CLASS_NAMES[cls] for cls in LAYER_CLASSES)

Rows = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a policy's page says. `numbers` is of the model whose bytes and rates are told, `picture` of the small
    one that is drawn."""

    policy: str
    words: str
    numbers: Prediction
    picture: Prediction


@cache
def page(policy: str) -> Page:
    """Build and simulate both models by a policy, given by name or path and with any knobs: "streamed slots=3".

    Raises:
        PolicyError: there is no such policy or knob, or one that it needs is left out.
        ScheduleError: it is one of the user's own, and not safe.
    """
    return Page(
        policy=policy,
        words=policies.explain(_name(policy)),
        numbers=_predicted(policy, numbers=True),
        picture=_predicted(policy, numbers=False),
    )


def _name(policy: str) -> str:
    return policies.with_knobs(policy)[0]


def _short(policy: str) -> str:
    return policies.short(_name(policy))


@cache
def _predicted(policy: str, *, numbers: bool) -> Prediction:
    policy, given = policies.with_knobs(policy)
    scaled: dict[str, Knob] = {}
    if numbers:
        model = presets.load(NUMBERS_MODEL)
    else:
        whole = presets.load(PICTURE_MODEL)
        name = f"{PICTURE_BLOCKS} blocks of {PICTURE_MODEL}"
        model = replace(whole, name=name, num_hidden_layers=PICTURE_BLOCKS)
        scaled = {  # so much less that these blocks show what the policy does to all
            knob: max(1, value * PICTURE_BLOCKS // whole.num_hidden_layers)
            for knob, known in policies.knobs(policy).items()
            if knob in IN_PARAMETERS and isinstance(value := given.get(knob, known.default), int)
        }
    profile = hardware.load(MACHINE)
    schedule = policies.build(policy, model, STEP, memory_of(profile), **given | scaled)
    if policy not in policies.names():
        verify(schedule)
    return predict(schedule, profile)


# ---- what is computed


def states(prediction: Prediction) -> Rows:
    """(what, device, host, NVMe): bytes per parameter of weights, gradients and optimizer state, by what a buffer
    holds in turn; then GB of everything else. Columns of tiers as in Tier."""
    held, rest = _bytes(prediction)
    params, peaks = prediction.schedule.model.total_params, prediction.peak_bytes
    rows = [[what, *(_per_param(sizes[tier] / params) for tier in Tier)] for what, sizes in held.items()]
    rows.append(["activations and logits, GB", *(f"{rest[t] / 1e9:.2f}" if rest[t] else "" for t in Tier)])
    rows.append(["peak with workspace, GB", *(f"{peaks[t] / 1e9:.2f}" if peaks[t] else "" for t in Tier)])
    return rows


def _bytes(prediction: Prediction) -> tuple[dict[str, dict[Tier, int]], dict[Tier, int]]:
    """Bytes of states by what a buffer holds in turn, all together last; and of everything else."""
    held: dict[str, dict[Tier, int]] = {}
    rest: dict[Tier, int] = dict.fromkeys(Tier, 0)
    for tier in Tier:
        for what, nbytes in contents(prediction.schedule, tier):
            if _STATES.isdisjoint(what.split(" / ")):
                rest[tier] += nbytes
            else:
                held.setdefault(what, dict.fromkeys(Tier, 0))[tier] += nbytes
    order = sorted(held, key=lambda what: (what.count("/"), -sum(held[what].values())))
    total = {tier: sum(sizes[tier] for sizes in held.values()) for tier in Tier}
    return {what: held[what] for what in order} | {"all states": total}, rest


def _per_param(nbytes: float) -> str:
    return f"{nbytes:.2f}" if nbytes else ""


# headings of columns that are no numbers
_WORDS = frozenset({"", "what", "what binds", "policy", "what it does", "state"})
STATES_HEADING = ("what", *(str(tier) for tier in Tier))
SPEED_HEADING = ("", "step", "tokens/s", "bound", "above it", "what binds")


def speed(policy: str) -> Rows:
    """(policy, step, tokens/s, bound of that schedule, gap, what binds) of the policy and of the yardstick."""
    rows = []
    for name in dict.fromkeys((policy, YARDSTICK)):
        found = _predicted(name, numbers=True)
        told = rate(found.tokens_per_s) if found.fits else "does not fit"
        rows.append(
            [
                _label(name),
                seconds(found.period_ns / 1e9),
                told,
                seconds(found.bound_ns / 1e9),
                f"{found.gap:.1%}",
                found.binding,
            ]
        )
    return rows


def record(policy: str) -> dict[str, Any]:
    """The numbers of `states` and `speed` for programs: bytes per parameter, GB (10^9 bytes), seconds and tokens/s,
    and what they are of. The rate of what does not fit is None. Raises as `page` does."""
    found = _predicted(policy, numbers=True)
    schedule, step = found.schedule, found.schedule.workload
    held, rest = _bytes(found)
    return {
        "model": schedule.model.name,
        "micro_batch_size": step.micro_batch_size,
        "accumulation": step.accumulation,
        "seq_len": step.seq_len,
        "precision": step.precision,
        "machine": found.profile.name,
        "mode": found.profile.mode,
        "bytes_per_parameter": {
            what: {tier: nbytes / schedule.model.total_params for tier, nbytes in sizes.items()}
            for what, sizes in held.items()
        },
        "activations_and_logits_gb": {tier: nbytes / 1e9 for tier, nbytes in rest.items()},
        "peak_with_workspace_gb": {tier: found.peak_bytes[tier] / 1e9 for tier in Tier},
        "speed": [_speed_record(name) for name in dict.fromkeys((policy, YARDSTICK))],
    }


def _label(policy: str) -> str:
    """Marked where its training is not exact, and with the knobs that are given."""
    given = policies.with_knobs(policy)[1]
    label = _predicted(policy, numbers=True).schedule.label
    return " ".join([label, *(f"{knob}={value}" for knob, value in given.items())])


def _speed_record(policy: str) -> dict[str, Any]:
    found = _predicted(policy, numbers=True)
    return {
        "label": _label(policy),
        "fits": found.fits,
        "step_s": found.period_ns / 1e9,
        "tokens_per_s": found.tokens_per_s if found.fits else None,
        "bound_s": found.bound_ns / 1e9,
        "gap": found.gap,
        "binding": found.binding,
    }


def about(prediction: Prediction) -> str:
    """What a prediction is of, in a line."""
    step = prediction.schedule.workload
    return (
        f"{prediction.schedule.model.name}, {step.accumulation} x {step.micro_batch_size} sequences of {step.seq_len} "
        f"tokens, {step.precision}, predicted from the {prediction.profile.mode} profile {prediction.profile.name}"
    )


def drawing(found: Page, columns: int | None = None) -> list[str]:
    """The steady step as text, with its length and legend; its lanes in as many columns, if they would need more."""
    picture = found.picture
    scaled = [f"{name}={picture.schedule.knobs[name]}" for name in IN_PARAMETERS if name in picture.schedule.knobs]
    head = f"{about(picture)}: step of {seconds(picture.period_ns / 1e9)}"
    head += f"; {', '.join(scaled)}, scaled with the blocks" if scaled else ""
    return [head, "", *text_gantt(picture.schedule, picture.trace, columns), "", legend(picture.schedule), SMALL]


# ---- pages


def markdown(policy: str) -> str:
    """The page of a policy, beside which its picture stands as NAME.png, by the name of its schedules."""
    found, name = page(policy), _short(policy)
    words, _, knobs = found.words.rpartition("\n\nKnobs:\n")
    lead, _, body = (words or found.words.removesuffix("\n\nNo knobs.")).partition("\n")
    lines = [f"# `{name}`", "", lead, "", body.strip(), ""]
    lines += ["## One step", "", f"![a step of {name}]({name}.png)", "", "```", *drawing(found), "```", ""]
    lines += [
        "## Where states live",
        "",
        f"{about(found.numbers)}. Bytes per parameter, from the buffers it builds.",
        "",
    ]
    lines += [_table(STATES_HEADING, states(found.numbers))]
    lines += ["## How fast", "", "The same step; no run of a schedule settles at a step shorter than its bound.", ""]
    lines += [_table(SPEED_HEADING, speed(policy))]
    lines += ["## Knobs", "", f"```\n{knobs}\n```" if knobs else "None.", ""]
    lines += [f"Schedules {found.numbers.schedule.short_digest} and {found.picture.schedule.short_digest}. {_made()}"]
    return "\n".join(lines) + "\n"


def index(names: Sequence[str]) -> str:
    """The index of all pages."""
    yardstick = _predicted(YARDSTICK, numbers=True)
    rows = []
    for name in sorted(names, key=lambda name: _predicted(name, numbers=True).period_ns):
        found = _predicted(name, numbers=True)
        total = next(row for row in states(found) if row[0] == "all states")
        told = rate(found.tokens_per_s) if found.fits else "does not fit"
        ratio = f"{found.tokens_per_s / yardstick.tokens_per_s:.2f}" if found.fits else ""
        link = f"[{_label(name)}]({_short(name)}.md)"
        rows.append([link, policies.summary(_name(name)), found.schedule.workload.precision, told, ratio, *total[1:]])
    heading = ("policy", "what it does", "state", "tokens/s", f"x {YARDSTICK}", *(f"{tier} B/param" for tier in Tier))
    step = about(yardstick).replace(f" {yardstick.schedule.workload.precision},", "")
    lines = ["# Policies", ""]
    lines += [f"{step}. Every policy as it comes, asked for bf16 weights and fp32 moments."]
    lines += ["`state` says where its system adds an fp32 master, each page what other state that system's users have."]
    lines += ["B/param: bytes per parameter.", ""]
    lines += [_table(heading, rows)]
    lines += [f"All at one scale: {about(_predicted(YARDSTICK, numbers=False))}, longest step last.", ""]
    lines += [f"![all policies]({OVERVIEW})", "", _made()]
    return "\n".join(lines) + "\n"


def _made() -> str:
    return f"Made by `{COMMAND}`."


def _table(heading: Sequence[str], rows: Rows) -> str:
    lines = [heading, ["---" if name in _WORDS else "---:" for name in heading], *rows]
    return "\n".join(map(markdown_line, lines)) + "\n"


def texts(names: Sequence[str]) -> dict[str, str]:
    """File name -> text, of the index and of every page."""
    return {"README.md": index(names)} | {f"{_short(name)}.md": markdown(name) for name in names}


def write(folder: Path, names: Sequence[str]) -> None:
    """Write the index, a page per policy and the pictures.

    Raises:
        InputError: the folder cannot be written.
    """
    from analysis import figure, gantt

    for name, text in texts(names).items():
        write_text(folder / name, text)
    runs = {name: (found.schedule, found.trace) for name in names for found in (page(name).picture,)}
    for name, run in runs.items():
        figure.save_png(figure.figure_of(gantt.gantt([run])), folder / f"{_short(name)}.png", _DPI)
    longest_last = sorted(names, key=lambda name: page(name).picture.period_ns)
    limit_ms = _SCALE * _predicted(YARDSTICK, numbers=False).period_ns / 1e6
    strips = gantt.strips([runs[name] for name in longest_last], limit_ms)
    figure.save_png(figure.figure_of(strips), folder / OVERVIEW, _DPI)
