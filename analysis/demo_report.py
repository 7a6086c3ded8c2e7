"""What `make demo` leaves behind: pictures, timelines and tables of one demonstration."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis import compare, figure, gantt, perfetto, plots, report
from megatrain.demo import POLICIES, Demo, Run
from megatrain.this_machine import today
from schedules import presets
from schedules.op import Tier
from schedules.workload import Workload
from sim import hardware

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP = 2  # measured steps left out: threads and caches settle
SIMULATED_MODELS = ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
SIMULATED_HARDWARE = "h200"
SIMULATED_WORKLOAD = Workload(micro_batch_size=16, seq_len=1024)
PACKAGES = ("torch", "simpy", "numpy", "pandas", "matplotlib")
SHOWN = "streamed"  # the policy whose steps are drawn, where there was room for it


def write(folder: Path, demo: Demo, command: str, progress: Callable[[float, str], None]) -> Path:
    """Write everything; returns the path of the index."""
    times = step_times(demo)
    progress(0.0, "simulating larger models")
    simulated = larger_models()
    pictures = folder / "pictures"
    progress(0.4, "drawing")
    figure.save(figure.figure_of(plots.throughput(simulated)), pictures / "throughput", simulated)
    figure.save(figure.figure_of(plots.predicted_against_measured(times)), pictures / "predicted_measured", times)
    losses = loss_table(demo)
    figure.save(figure.figure_of(plots.loss(losses)), pictures / "loss", losses)
    shown = _shown(demo)
    pair = [(shown.schedule, shown.prediction.trace), (shown.schedule, shown.trained.trace)]
    figure.save(figure.figure_of(gantt.gantt(pair)), pictures / "gantt", gantt.gantt_data(pair))
    _save_memory(shown, demo, pictures / "memory")
    progress(0.8, "writing timelines")
    timelines = []
    for run in demo.runs:
        timelines.append(folder / "timelines" / f"{run.schedule.policy}.json")
        perfetto.write(timelines[-1], [(run.schedule, run.prediction.trace), (run.schedule, run.trained.trace)])
    origin = report.Origin(
        machine=demo.runs[0].trained.trace.machine,
        date=today(),
        command=command,
        versions={"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    )
    return report.write_report(
        folder,
        "Demonstration",
        origin,
        comparison=pd.concat([_rows(demo, times), simulated], ignore_index=True),
        predicted_measured=times,
        sections=_sections(demo, pictures, timelines),
    )


def larger_models() -> pd.DataFrame:
    """What the policies would do with larger models; the baseline keeps the state that the others keep."""
    names = [compare.SAME_STATE if name == compare.BASELINE else name for name in POLICIES]
    return compare.compare(
        [presets.load(name) for name in SIMULATED_MODELS],
        names,
        hardware.load(SIMULATED_HARDWARE),
        [SIMULATED_WORKLOAD],
    )


def step_times(demo: Demo) -> pd.DataFrame:
    """Predicted and measured seconds of a step and their ranks, a row per policy, fastest measured first.

    Measured is the median step; `spread` is the width of the middle half of all steps, over the median.
    """
    rows = []
    for run in demo.runs:
        quarter, median, three_quarters = np.percentile(run.trained.trace.step_ns(WARMUP), (25, 50, 75))
        rows.append(
            {
                "model": demo.model.name,
                "policy": run.schedule.policy,
                "predicted_s": run.prediction.period_ns / 1e9,
                "measured_s": median / 1e9,
                "spread": (three_quarters - quarter) / median,
                "digest": run.schedule.digest,
            }
        )
    return compare.ranked(pd.DataFrame(rows))


def loss_table(demo: Demo) -> pd.DataFrame:
    """A row per policy and step."""
    rows = [
        {"policy": run.schedule.policy, "step": step, "loss": loss}
        for run in demo.runs
        for step, loss in enumerate(run.trained.losses)
    ]
    return pd.DataFrame(rows)


def _rows(demo: Demo, times: pd.DataFrame) -> pd.DataFrame:
    """The demo's own comparison: predicted rows, then measured ones."""
    predicted = [compare.row_of(run.prediction) for run in demo.runs]
    measured_s = times.set_index("policy")["measured_s"]
    machine = demo.runs[0].trained.trace.machine
    measured = [compare.measured_row(row, measured_s[row.policy], machine) for row in predicted]
    return compare.frame([*predicted, *measured])


def _shown(demo: Demo) -> Run:
    return next((run for run in demo.runs if run.schedule.policy == SHOWN), demo.runs[0])


def _save_memory(run: Run, demo: Demo, stem: Path) -> None:
    """Device and host, one under the other."""
    axes = figure.stacked_axes(2, 10, 3.2)
    tiers = (Tier.DEVICE, Tier.HOST)
    capacities = (demo.profile.gpu.memory.value, demo.profile.host.memory.value)
    for ax, tier, capacity in zip(axes, tiers, capacities, strict=True):
        peak = run.prediction.peak_bytes[tier]
        plots.memory(run.schedule, run.prediction.trace, tier, capacity_bytes=int(capacity), peak_bytes=peak, ax=ax)
    data = pd.concat([plots.memory_data(run.schedule, run.prediction.trace, tier) for tier in tiers])
    figure.save(figure.figure_of(axes[0]), stem, data)


def _sections(demo: Demo, pictures: Path, timelines: list[Path]) -> list[report.Section]:
    steps = len(demo.runs[0].trained.losses)
    return [
        report.Section(
            title="Step times",
            text=f"A {demo.model.total_params / 1e6:.1f} M parameter decoder, {demo.workload.tokens_per_step} tokens a "
            f"step, {steps} steps with each policy, the first {WARMUP} left out of the measured time. The profile was "
            "measured before, on single ops; nothing is fitted to these runs.",
            pictures=[pictures / "predicted_measured.png"],
        ),
        report.Section(
            title="Loss",
            text=f"The standard library's source text, a token per byte, AdamW at {demo.lr:g}. The policies "
            "train the same model: the curves lie on one another.",
            pictures=[pictures / "loss.png"],
        ),
        report.Section(
            title=f"One step of {_shown(demo).schedule.policy}, predicted and measured",
            pictures=[pictures / "gantt.png", pictures / "memory.png"],
        ),
        report.Section(
            title=f"Larger models, simulated on {SIMULATED_HARDWARE}",
            text="From a datasheet profile; nothing was measured. "
            f"`{compare.BASELINE}` keeps the state that the others keep, without an fp32 master (`master=weights`).",
            pictures=[pictures / "throughput.png"],
        ),
        report.Section(
            title="Timelines",
            text="Each holds the predicted and the measured run of one schedule; open it at ui.perfetto.dev.",
            files=timelines,
        ),
    ]
