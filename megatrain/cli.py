"""The command line: the one file that may import every package, each inside the subcommand that needs it."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from schedules.errors import InputError, Refused

if TYPE_CHECKING:
    from rich.progress import Progress

    from schedules.schedule import Schedule
    from schedules.workload import MemoryBudget, Workload
    from sim.hardware import HardwareProfile

app = typer.Typer(
    name="megatrain",
    help="See, prove, predict and run the schedules that train models far bigger than a GPU on one GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Target = Annotated[str, typer.Argument(help="A model's name, its config.json, or a schedule file.", show_default=False)]
Policy = Annotated[str, typer.Option("--policy", "-p", help="A policy's name, or a file of your own.")]
Hardware = Annotated[str, typer.Option("--hardware", "-H", help="A machine's name, or a profile file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a number: host.memory=256GiB. Repeatable.")]
Knob = Annotated[list[str] | None, typer.Option("--knob", "-k", help="Set a policy's knob: slots=3. Repeatable.")]
Batch = Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences per micro-batch.")]
Accumulation = Annotated[int, typer.Option("--accumulation", "-a", min=1, help="Micro-batches per step.")]
Seq = Annotated[int, typer.Option("--seq", "-s", min=1, help="Tokens per sequence.")]
Precision = Annotated[str, typer.Option("--precision", help="bf16, bf16_split, bf16_fp32 or fp32.")]
Clip = Annotated[float | None, typer.Option("--clip", help="Clip gradients to this global norm.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> NoReturn:
    """Run the command line; no traceback reaches a user for bad input.

    Exit codes: 0 done, 1 the answer is no (does not fit, does not verify), 2 wrong input, 130 interrupted.
    """
    try:
        app()  # tells misspelt commands and options itself, and leaves with 2
    except Refused as error:
        sys.exit(_told(str(error), 1))
    except (InputError, OSError) as error:
        sys.exit(_told(str(error), 2))
    sys.exit(0)


def _told(message: str, code: int) -> int:
    print(f"megatrain: {message}", file=sys.stderr)
    return code


# ---- what the options mean


def _workload(batch: int, accumulation: int, seq: int, precision: str, clip: float | None) -> Workload:
    from schedules.workload import Workload

    try:
        return Workload(
            micro_batch_size=batch, accumulation=accumulation, seq_len=seq, precision=precision, grad_clip=clip
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def _machine(hardware: str, changes: list[str] | None) -> HardwareProfile:
    from sim.hardware import load, override

    return override(load(hardware), changes or [])


def _is_schedule(target: str) -> bool:
    path = Path(target)
    if not path.is_file():
        return False
    with path.open(errors="replace") as file:
        return '"format"' in file.read(200)


def _schedule(target: str, policy: str, knobs: list[str] | None, workload: Workload, budget: MemoryBudget) -> Schedule:
    """A schedule from its file, or built by a policy for a model."""
    from schedules import codec, policies, presets

    if _is_schedule(target):
        return codec.read(Path(target))
    chosen = policies.parse_knobs(policy, knobs or [])
    return policies.build(policy, presets.load(target), workload, budget, **chosen)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


# ---- simulate, build, verify


@app.command()
def simulate(
    target: Target,
    policy: Policy = "streamed",
    hardware: Hardware = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    clip: Clip = None,
    knob: Knob = None,
    change: Set = None,
    trace: Annotated[Path | None, typer.Option(help="Write the predicted trace here.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev here.")] = None,
    as_json: Json = False,
) -> None:
    """Predict how fast a schedule runs on a machine, what limits it and whether it fits."""
    from megatrain.tables import prediction_record, print_prediction
    from schedules.verify import verify
    from sim.prediction import memory_of, predict

    profile = _machine(hardware, change)
    budget = memory_of(profile)
    schedule = _schedule(target, policy, knob, _workload(batch, accumulation, seq, precision, clip), budget)
    verify(schedule)
    prediction = predict(schedule, profile, budget)
    if trace is not None:
        prediction.trace.save(trace)
    if perfetto is not None:
        from analysis import perfetto as timeline

        timeline.write(perfetto, [(schedule, prediction.trace)])
    if as_json:
        _print_json(prediction_record(prediction))
    else:
        print_prediction(prediction)
    if prediction.does_not_fit is not None:
        raise prediction.does_not_fit


@app.command()
def build(
    target: Annotated[str, typer.Argument(help="A model's name, or its config.json.", show_default=False)],
    policy: Policy = "streamed",
    hardware: Annotated[str, typer.Option("--hardware", "-H", help="The machine whose memory to fit.")] = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    clip: Clip = None,
    knob: Knob = None,
    change: Set = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the schedule file here.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the grid: one column per stream.")] = False,
) -> None:
    """Build a policy's schedule for a model, verify it and write it to a file."""
    from megatrain.tables import print_summary
    from schedules import codec
    from schedules.show import grid
    from schedules.verify import verify
    from sim.prediction import memory_of

    budget = memory_of(_machine(hardware, change))
    schedule = _schedule(target, policy, knob, _workload(batch, accumulation, seq, precision, clip), budget)
    verify(schedule)
    if show:
        print(grid(schedule))
    if out is not None:
        codec.save(schedule, out)
    print_summary(schedule, f"written to {out}" if out else "not written: give --out FILE")


@app.command()
def verify(file: Annotated[Path, typer.Argument(help="A schedule file.", show_default=False)]) -> None:
    """Prove a schedule file safe, or tell everything that is wrong with it."""
    from megatrain.tables import print_summary
    from schedules import codec
    from schedules.verify import verify as prove

    schedule = codec.read(file)
    prove(schedule)
    print_summary(schedule, "safe: no race, no stale read, no deadlock; every gradient applied once")


# ---- compare


@app.command()
def compare(
    models: Annotated[list[str], typer.Argument(help="Models to compare policies on.", show_default=False)],
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="Repeatable; all if left out.")] = None,
    hardware: Hardware = "h200",
    batch: Batch = 8,
    accumulation: Accumulation = 1,
    seq: Seq = 1024,
    precision: Precision = "bf16",
    clip: Clip = None,
    change: Set = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a plot and its data to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Predict every policy on every model of a list, beside ZeRO-3 offload."""
    from analysis import compare as comparison
    from analysis import figure, plots, tables
    from schedules import policies, presets

    profile = _machine(hardware, change)
    workload = _workload(batch, accumulation, seq, precision, clip)
    chosen = policy or policies.names()
    found = []
    with _progress() as progress:
        task = progress.add_task("simulating", total=len(models) * len(chosen), note="")
        for spec in [presets.load(model) for model in models]:
            for row in comparison.rows(spec, chosen, profile, workload):
                found.append(row)
                progress.update(task, advance=1, note=f"{row.model} {row.policy}")
    frame = comparison.frame(found)
    if out is not None:
        figure.save(figure.figure_of(plots.throughput(frame)), out / "throughput", frame)
    if as_json:
        _print_json(tables.records(frame))
    else:
        tables.show_comparison(frame)


# ---- run and profile


@app.command()
def run(
    target: Target,
    policy: Policy = "streamed",
    hardware: Annotated[
        str | None, typer.Option("--hardware", "-H", help="A profile of this machine, to predict the run too.")
    ] = None,
    batch: Batch = 4,
    accumulation: Accumulation = 1,
    seq: Seq = 256,
    precision: Precision = "fp32",
    clip: Clip = None,
    knob: Knob = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")] = 20,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the order of the data.")] = 0,
    expect: Annotated[str | None, typer.Option(help="Refuse any schedule whose digest does not begin so.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Poison free buffers and delay streams at random.")] = False,
    backend: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the measured trace here.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a schedule and train by it, on this machine, on Python's own source files."""
    from schedules.verify import verify
    from schedules.workload import MemoryBudget
    from sim.prediction import memory_of, predict

    profile = _machine(hardware, None) if hardware else None
    budget = memory_of(profile) if profile else MemoryBudget(device_bytes=1 << 34, host_bytes=1 << 34)
    schedule = _schedule(target, policy, knob, _workload(batch, accumulation, seq, precision, clip), budget)
    if expect is not None and not schedule.digest.startswith(expect):
        raise Refused(f"the schedule's digest is {schedule.short_digest}, not {expect}: it is not the one you verified")
    verified = verify(schedule)

    from megatrain.session import train

    with _progress() as progress:
        task = progress.add_task(f"training {schedule.policy}", total=steps, note="")
        result = train(
            verified,
            steps=steps,
            lr=lr,
            seed=seed,
            debug=debug,
            backend=backend,
            on_loss=lambda step, loss: progress.update(task, advance=1, note=f"loss {loss:.3f}"),
        )
    if trace is not None:
        result.trace.save(trace)
    record: dict[str, Any] = {**schedule.describe(), "losses": result.losses, "machine": result.trace.machine}
    if steps > 2:
        record["measured_step_s"] = statistics.median(result.trace.step_ns()) / 1e9
        record["measured_tokens_per_s"] = schedule.workload.tokens_per_step / record["measured_step_s"]
    if profile is not None:
        from sim.prediction import predict

        record["predicted_step_s"] = predict(schedule, profile, budget).period_ns / 1e9
    if as_json:
        _print_json(record)
        return
    print(f"{schedule.label}, digest {schedule.short_digest}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
    if "measured_step_s" in record:
        rate = record["measured_tokens_per_s"]
        print(f"measured {record['measured_step_s'] * 1e3:,.1f} ms a step, {rate:,.0f} tokens/s")
    if "predicted_step_s" in record:
        print(f"predicted {record['predicted_step_s'] * 1e3:,.1f} ms a step")


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="The model whose layers are timed.")] = "demo",
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the profile here.")] = Path("profile.json"),
    batch: Batch = 4,
    accumulation: Accumulation = 1,
    seq: Seq = 256,
    precision: Precision = "fp32",
    clip: Clip = None,
) -> None:
    """Measure this machine: copies, layers, optimizer, issue cost. The file serves --hardware anywhere."""
    from megatrain.profile import measure
    from schedules import policies as known
    from schedules import presets
    from schedules.workload import MemoryBudget
    from sim.hardware import save

    workload = _workload(batch, accumulation, seq, precision, clip)
    spec = presets.load(model)
    with _progress() as progress:
        task = progress.add_task("measuring", total=1.0, note="")
        everything = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)
        measured = measure(
            spec,
            [known.build(policy, spec, workload, everything) for policy in known.names()],
            progress=lambda done, note: progress.update(task, completed=done, note=note),
        )
    save(measured, out)
    print(f"written to {out}; use it with --hardware {out}")


# ---- lists


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="A model's name or config.json; all if left out.")] = None,
    as_json: Json = False,
) -> None:
    """List the models that come with it, or describe one."""
    from megatrain.tables import print_table
    from schedules import presets

    chosen = [name] if name else presets.names()
    specs = [presets.load(model) for model in chosen]
    if as_json:
        _print_json([{**spec.to_dict(), "total_params": spec.total_params} for spec in specs])
        return
    columns = ["model", "parameters", "blocks", "hidden", "heads", "vocabulary", "one block", "embedding", "head"]
    rows = [
        [
            spec.name,
            f"{spec.total_params:,}",
            f"{spec.num_hidden_layers}",
            f"{spec.hidden_size:,}",
            f"{spec.num_attention_heads}/{spec.num_key_value_heads}",
            f"{spec.vocab_size:,}",
            f"{spec.params(0):,}",
            f"{spec.params(spec.embed):,}",
            "tied" if spec.tie_word_embeddings else f"{spec.params(spec.head):,}",
        ]
        for spec in specs
    ]
    print_table("models (parameters; heads as query/key-value)", columns, rows)


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(help="A machine's name or profile file; all if left out.")] = None,
    change: Set = None,
    as_json: Json = False,
) -> None:
    """List the machines that come with it, or every number of one with its source."""
    from megatrain.tables import print_table
    from sim import hardware as machines

    if name is None:
        profiles = [machines.load(machine) for machine in machines.names()]
        if as_json:
            _print_json([machines.to_json(machine) for machine in profiles])
            return
        rows = [
            [
                p.name,
                p.description,
                str(p.gpu.memory),
                str(p.gpu.matmul_flops),
                str(p.links.h2d.bandwidth),
                str(p.host.memory),
            ]
            for p in profiles
        ]
        print_table("machines", ["machine", "", "device memory", "peak bf16", "H2D", "host memory"], rows, left=2)
        return
    chosen = _machine(name, change)
    if as_json:
        _print_json(machines.to_json(chosen))
        return
    rows = [list(row) for row in machines.listing(chosen)]
    print_table(f"{chosen.name}: {chosen.description}", ["number", "value", "meaning", "source"], rows, left=4)


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="A policy's name or file; all if left out.")] = None,
) -> None:
    """List the policies, or explain one and its knobs."""
    from megatrain.tables import print_table
    from schedules import policies as known

    if name is None:
        rows = [[policy, known.summary(policy)] for policy in known.names()]
        print_table("policies", ["policy", "what it does"], rows, left=2)
        return
    print(known.explain(name))


@app.command()
def published(as_json: Json = False) -> None:
    """Predict every published point from datasheets, nothing tuned, beside the published number."""
    from analysis import published as points
    from analysis import tables

    with _progress() as progress:
        progress.add_task("simulating", total=None, note="")
        frame, phases = points.reproduce(), points.phases()
    if as_json:
        _print_json({"points": tables.records(frame), "phases": tables.records(phases)})
        return
    tables.show(frame, tables.PUBLISHED, title="published points", note=tables.PUBLISHED_NOTE)
    tables.show(phases, tables.PHASES, title="one step of MegaTrain 14B on MI355X, part by part")


# ---- demo


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the results.")] = Path("results/demo"),
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps to train with each policy.")] = 40,
) -> None:
    """Measure this machine, simulate five policies, train with each, and lay both side by side."""
    from analysis import demo_report, tables
    from megatrain import demo as demonstration

    with _progress() as progress:

        def stage(name: str) -> Callable[[float, str], None]:
            task = progress.add_task(name, total=1.0, note="")
            return lambda done, note: progress.update(task, completed=done, note=note)

        profile = demonstration.measure_machine(out, stage("measuring this machine"))
        results = demonstration.run_all(out, profile, steps, stage("training with every policy"))
        finish = stage("writing results")
        index = demo_report.write(out, results, f"megatrain demo --out {out} --steps {steps}", finish)
        finish(1.0, "")
    times = demo_report.step_times(results)
    tables.show(times, tables.PREDICTED_MEASURED, note=tables.PREDICTED_MEASURED_NOTE)
    for run in results.runs[:1]:
        print(f"loss {run.trained.losses[0]:.2f} -> {run.trained.losses[-1]:.2f} in {steps} steps")
    print(f"tables, pictures and timelines: {index}")


if __name__ == "__main__":
    main()
