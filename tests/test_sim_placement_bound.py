"""The bound over all placements: no schedule is below it, and it is as high as it was."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import pytest
import scipy.optimize
from interleavings import interleaved
from small_steps import MACHINES, machine, period_if_it_fits, shallow, state_bytes, step
from strategies import round_profile
from timed_profile import timed

from schedules import policies, presets
from schedules.model import ModelSpec
from schedules.op import Phase, Stream, Tier
from schedules.program import Program
from schedules.ring import Ring
from schedules.saved import hidden_bytes, saved_bytes
from schedules.schedule import Knob, Schedule
from schedules.sizes import tensor_bytes
from schedules.tensor import parts
from schedules.verify import verify
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from schedules.workspace import workspace_bytes
from sim import hardware
from sim.cost import demands
from sim.machine import HardwareProfile, Measured
from sim.placement_bound import SOLVED_TO, NoPlacement, PlacementBound, placement_bound
from sim.prediction import memory_of, peak_bytes, predict
from sim.signature import timed as timed_ops

ROOMY = MemoryBudget(device_bytes=1 << 50, host_bytes=1 << 50, nvme_bytes=1 << 50)


def bound_of_all_like(schedule: Schedule, profile: HardwareProfile) -> PlacementBound:
    """The bound of its step with no byte of memory more than it takes."""
    peak = peak_bytes(schedule, profile)
    budget = MemoryBudget(device_bytes=peak[Tier.DEVICE], host_bytes=peak[Tier.HOST], nvme_bytes=peak.get(Tier.NVME, 0))
    return placement_bound(schedule.model, schedule.workload, profile, budget)


def there_and_back(p: Program) -> None:
    """Forward, loss and backward of one micro-batch, by what lives on the device."""
    for i in p.model.layers[:-1]:
        p.forward(i)
    p.loss()
    for i in reversed(p.model.layers[:-1]):
        p.backward(i)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(
    "workload",
    [step(1), step(16), step(2, accumulation=3), step(4, precision="fp32"), step(1, accumulation=2, grad_clip=1.0)],
)
def test_no_exact_policy_is_faster_than_the_bound(name: str, workload: Workload) -> None:
    model = shallow(4)
    held = state_bytes(model) / 1e9
    simulated = 0
    for profile in (hardware.load(name), machine(name, device_gb=0.7 * held, host_gb=3 * held)):
        limit = functools.cache(functools.partial(placement_bound, model, profile=profile))  # most have one step
        for policy in policies.comparable():
            schedule = policies.build(policy, model, workload, memory_of(profile))
            if schedule.allocated_bytes(Tier.NVME) and profile.nvme is None:
                continue
            if schedule.staleness == 0 and (period := period_if_it_fits(schedule, profile)) is not None:
                simulated += 1
                assert period >= limit(schedule.workload).period_ns, policy
    assert simulated >= 15


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(24))
def test_no_order_of_micro_batches_is_faster_than_the_bound(seed: int) -> None:
    """With memory so short that micro-batches must share loads, or be recomputed, or go away."""
    chance = random.Random(seed)
    blocks, model = 4, shallow(4)
    batch, accumulation = chance.choice([1, 4, 16]), chance.choice([2, 3, 8])
    workload = step(batch, accumulation=accumulation, recompute=RECOMPUTED[seed % len(RECOMPUTED)])
    workload = replace(workload, grad_clip=[None, 1.0][seed // 2 % 2])
    name, device = chance.choice(MACHINES), chance.uniform(0.3, 2.0) * state_bytes(model) / 1e9 + 1.0
    profile = hardware.override(hardware.load(name), [f"gpu.memory={device:.3f}GB"])
    limit = placement_bound(model, workload, profile)
    for singly, order, hold in itertools.product((0, 2, blocks), ("layers", "microbatches"), (0, 2)):
        knobs: dict[str, Knob] = {"singly": singly, "order": order, "hold": hold, "offload": chance.randint(0, blocks)}
        knobs |= {"resident": chance.choice([0, 0, 2]), "parts": chance.choice([1, 4])}
        knobs |= {"through": blocks if seed % 3 == 0 and order == "layers" else 0}
        schedule = policies.build("streamed", model, workload, memory_of(profile), **knobs)
        period = period_if_it_fits(schedule, profile)
        assert period is None or period >= limit.period_ns, knobs


@pytest.mark.parametrize("clip", [None, 1.0])
def test_bound_of_a_long_step_that_fits_the_device_is_its_compute(clip: float | None) -> None:
    model, workload, profile = shallow(3), step(64, seq=2048, grad_clip=clip), hardware.load("h200")
    whole = predict(policies.build("resident", model, workload, memory_of(profile)), profile)
    limit = placement_bound(model, workload, profile)
    assert limit.binding == "gpu"
    # left out: issuing, and the update on the device, which the CPU could do meanwhile
    assert 0.97 * whole.period_ns < limit.period_ns <= whole.period_ns


def test_less_memory_never_lowers_the_bound() -> None:
    model, workload = shallow(4), step(8)
    held = state_bytes(model) / 1e9
    found = [
        placement_bound(model, workload, machine("rtx4090", device_gb=share * held, host_gb=2 * held)).period_ns
        for share in (2.0, 1.0, 0.7, 0.5)
    ]
    assert found == sorted(found) and found[0] < found[-1]


def test_what_the_solver_is_off_by_is_taken_off_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this program it finds a period that is too long by a part in 10^8, and the true one if it must be exact."""
    settings = ["gpu.memory=9.1GB", "host.memory=60.1GB", "gpu.matmul_flops=3250TFLOP/s"]
    profile = hardware.override(hardware.load("gb300"), settings)
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=5)

    def found() -> float:
        return placement_bound(model, step(1, seq=2048, accumulation=2), profile).period_ns

    usual, linprog = found(), scipy.optimize.linprog
    exact = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    monkeypatch.setattr(scipy.optimize, "linprog", functools.partial(linprog, options=exact))
    assert usual < found() / (1.0 - SOLVED_TO) < usual * 1.000001


@pytest.mark.parametrize(
    ("device_gb", "host_gb", "workload", "period_ms", "binding"),
    [
        (20, 30, step(1), 17.3574, "optimizer"),
        (8, 30, step(16), 128.8577, "optimizer"),
        (6, 30, step(4, accumulation=4), 128.2390, "gpu"),
        (6, 30, step(16, accumulation=8), 912.3061, "gpu"),
        (7, 30, step(32, accumulation=2), 490.4238, "gpu"),
        (5, 30, step(1, accumulation=32), 236.1902, "gpu"),
        (4, 9, step(4, accumulation=16), 455.4029, "nvme.write"),
        # what leaves does so beside the forward, and comes beside the backward
        (6, 30, step(8, seq=4096, recompute="mlp"), 557.9409, "gpu"),
        (12, 30, step(64), 497.6588, "gpu"),
        (4, 6, step(4), 549.4522, "nvme.write"),
        (40, 60, step(16), 114.9501, "optimizer"),
        (3, 30, step(1, precision="bf16_8bit"), 33.5300, "link.duplex"),
        (12, 2, step(64, recompute="mlp"), 521.2225, "nvme.write"),
        (5, 1, step(64, accumulation=8, recompute="mlp"), 4208.5694, "nvme.write"),  # with weights on the drive
        # all updates follow the last backward
        (8, 30, step(16, grad_clip=1.0), 144.7525, "gpu"),
        (6, 30, step(4, accumulation=4, grad_clip=1.0), 133.5977, "link.duplex"),
        (40, 60, step(16, grad_clip=1.0), 115.2676, "gpu"),
        (3, 30, step(4, optimizer="muon", accumulation=32, grad_clip=1.0), 1097.6464, "gpu"),
    ],
)
def test_the_bound_is_what_it_was(
    device_gb: float, host_gb: float, workload: Workload, period_ms: float, binding: str
) -> None:
    """A bound that is too low no schedule contradicts, and few one that is too high; here it would show.

    The numbers go with the costs of ops.
    """
    profile = round_profile(f"gpu.memory={device_gb}GB", f"host.memory={host_gb}GB", "nvme.capacity=1TB")
    found = placement_bound(shallow(4), workload, profile)
    assert (found.period_ns / 1e6, found.binding) == (pytest.approx(period_ms, rel=1e-5), binding)
    for what in ("weights", "state", "activations"):
        shares = [share for label, share in found.placed.items() if label.startswith(what)]
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= -1e-9


@pytest.mark.parametrize(
    ("clip", "period_ms", "binding"), [(None, 2381.5375, "optimizer"), (1.0, 2951.0252, "link.duplex")]
)
def test_with_clipping_states_without_room_come_after_the_last_backward(
    clip: float | None, period_ms: float, binding: str
) -> None:
    """A mixture's states: many bytes for little that is computed beside them."""
    large = presets.load("gpt-oss-120b")
    model = replace(large, num_hidden_layers=6, layer_types=large.layer_types[:6], vocab_size=8192)
    profile = round_profile("gpu.memory=32GB", "host.memory=250GB", "host.memory_bandwidth=200GB/s")
    found = placement_bound(model, step(16, accumulation=8, grad_clip=clip), profile)
    assert (found.period_ns / 1e6, found.binding) == (pytest.approx(period_ms, rel=1e-5), binding)


def test_a_quick_drive_takes_activations_too() -> None:
    drive = ("nvme.capacity=1TB", "nvme.read=40GB/s", "nvme.write=40GB/s")
    profile = round_profile("gpu.memory=4GB", "host.memory=1GB", *drive)
    found = placement_bound(shallow(4), step(16, accumulation=16), profile)
    assert found.period_ns / 1e6 == pytest.approx(1938.6204, rel=1e-5)
    assert found.placed["activations on NVMe"] > 0.01 and found.placed["weights on NVMe"] > 0.1


@pytest.mark.parametrize(
    ("device_gb", "host_gb", "rate", "workload", "period_ms"),
    [
        (10, 20, 5, step(4, seq=2048, accumulation=8, recompute="pointwise"), 7833.7318),
        (10, 20, 12, step(4, seq=2048, accumulation=8, recompute="pointwise"), 6843.6595),
        (10, 20, 12, step(4, seq=2048, accumulation=8), 7091.9579),
        # with weights on it, too
        (12, 3, 12, step(4, seq=2048), 4482.9262),
        (12, 3, 12, step(4, seq=2048, accumulation=4), 4597.0178),
    ],
)
def test_a_drive_has_no_updates_to_serve_between_the_first_turn_and_the_last(
    device_gb: float, host_gb: float, rate: int, workload: Workload, period_ms: float
) -> None:
    drive = ("nvme.capacity=1TB", f"nvme.read={rate}GB/s", f"nvme.write={rate}GB/s")
    profile = round_profile(f"gpu.memory={device_gb}GB", f"host.memory={host_gb}GB", *drive)
    found = placement_bound(shallow(28), workload, profile)
    assert found.period_ns / 1e6 == pytest.approx(period_ms, rel=1e-5)


def test_weights_that_the_device_updates_and_has_no_room_for_leave_it_and_come_again() -> None:
    """Beside the last block's backward there is room for nothing, between the steps for two blocks' weights."""
    model, workload, last = shallow(4), step(1), 3
    at_once = sum(tensor_bytes(f"{cls}.{last}", model, workload) for cls in "wg") + saved_bytes(model, last, workload)
    at_once += hidden_bytes(model, workload) + max(
        workspace_bytes(model, i, phase, workload) for i, phase in ((last, Phase.BACKWARD), (model.head, Phase.LOSS))
    )
    slow = "host.adam_params_per_s=0.001Gparams/s"
    limit = placement_bound(model, workload, round_profile(f"gpu.memory={at_once + 1}bytes", slow))
    assert limit.placed["state through device"] > 0.999
    states = state_bytes(model, 8)
    others = sum(tensor_bytes(f"w.{model.layer_name(i)}", model, workload) for i in model.layers if i != last)
    assert limit.areas_ns["link.d2h"] == pytest.approx((states + others) / 40, rel=1e-3)
    block = tensor_bytes("w.0", model, workload)
    assert limit.areas_ns["link.h2d"] > (states + 3 * block + 2 * block) / 50  # three at the turn, two for the forward


def test_a_block_larger_than_the_head_needs_room_for_its_own_backward() -> None:
    """Weights and gradient of a mixture's block are there then, and its activations; the loss would need far less."""
    large = presets.load("gpt-oss-120b")
    model = replace(large, num_hidden_layers=2, layer_types=large.layer_types[:2])
    workload = step(1)
    at_once = 2 * tensor_bytes("w.1", model, workload) + saved_bytes(model, 1, workload)
    assert at_once > 10 * tensor_bytes("w.head", model, workload)

    def bound_with(device_gb: float) -> PlacementBound:
        return placement_bound(model, workload, machine("h200", device_gb=device_gb, host_gb=1000))

    with pytest.raises(NoPlacement):
        bound_with(0.99 * at_once / 1e9)
    ample, short = (bound_with(at_once / 1e9 + more).placed for more in (100, 8))
    assert ample["state on device"] > short["state on device"] > 0.0


@pytest.mark.parametrize("seed", range(36))
def test_nothing_random_is_below_the_bound_or_fits_where_it_says_that_nothing_does(seed: int) -> None:
    """Blocks larger than the head and smaller ones, and a small one before large ones, in little memory."""
    chance = random.Random(seed)
    blocks, large = chance.choice([1, 2, 4]), presets.load("gpt-oss-120b")
    mixture = replace(large, num_hidden_layers=blocks, layer_types=large.layer_types[:blocks], num_experts=16)
    first_dense = replace(presets.load("glm-4.5-air"), num_hidden_layers=blocks, num_experts=16)
    model = chance.choice([shallow(blocks), replace(mixture, vocab_size=8192), replace(first_dense, vocab_size=8192)])
    workload = step(chance.choice([1, 16, 64]), accumulation=chance.choice([1, 2, 8]))
    workload = replace(workload, grad_clip=[None, 1.0][seed % 2])
    held = state_bytes(model) / 1e9
    device, host = chance.uniform(0.2, 1.5) * held + 0.5, chance.uniform(0.3, 2.0) * held
    profile = machine(chance.choice(MACHINES), device_gb=device, host_gb=host)
    try:
        least = placement_bound(model, workload, profile).period_ns
    except NoPlacement:
        least = math.inf
    for _ in range(6):
        parts = chance.choice([1, 2, 4])
        counts = ("offload", "inputs", "resident", "through", "defer", "hold")
        knobs: dict[str, Knob] = {name: chance.choice([0, 0, chance.randint(1, blocks)]) for name in counts}
        knobs |= {name: chance.choice([1, 2]) for name in ("slots", "grad_slots", "slabs", "every")}
        knobs |= {"parts": parts, "stay": chance.choice([0, chance.randint(1, blocks * parts)])}
        if profile.nvme is not None:
            knobs |= {"nvme": chance.randint(0, blocks * parts), "nvme_offload": chance.choice([0, blocks])}
        schedule = policies.build("streamed", model, workload, memory_of(profile), **knobs)
        period = period_if_it_fits(schedule, profile)
        assert period is None or period >= least, knobs


def test_state_that_lies_on_nvme_is_counted_where_it_is_updated_and_once() -> None:
    model, profile = shallow(4), hardware.load("h200")
    host = 0.2 * state_bytes(model)
    budget = MemoryBudget(device_bytes=6 * 10**9, host_bytes=round(host), nvme_bytes=10**12)
    placed = placement_bound(model, step(4), profile, budget).placed
    state = {label: share for label, share in placed.items() if label.startswith("state")}
    assert state.keys() == {"state on device", "state through device", "state on CPU"}
    assert state["state on CPU"] * state_bytes(model, 10) > host  # so some of it is on NVMe
    assert sum(state.values()) == pytest.approx(1.0)


def test_state_that_is_on_the_device_may_be_updated_on_the_cpu() -> None:
    """A host with room for one layer's state at a time, beside a device whose memory is slow."""
    model, workload = shallow(4), step(1)
    p = Program(model, workload)
    state, grad = p.buffer("state", Tier.HOST), p.buffer("grad", Tier.HOST)
    for i in model.layers:
        p.keep_on_device(p.weight(i), p.grad(i), p.state(i))
    there_and_back(p)
    for i in model.layers:
        p.offload(p.grad(i), out_of=p.home(p.grad(i)), into=grad)
        p.offload(p.state(i), out_of=p.home(p.state(i)), into=state)
        p.offload(p.weight(i), out_of=p.home(p.weight(i)), into=p.buffer("weight", Tier.HOST))
        p.update(i, grad=(grad, p.grad(i)), weights="weight", state=state)
        p.prefetch(p.state(i), out_of=state, into=p.home(p.state(i)))
        p.prefetch(p.weight(i), out_of="weight", into=p.home(p.weight(i)))
    schedule = p.build(policy="by hand")
    verify(schedule)
    rates = ("gpu.memory_bandwidth=20GB/s", "links.h2d.bandwidth=200GB/s", "links.d2h.bandwidth=200GB/s")
    profile = round_profile(*rates, "links.duplex=400GB/s", "host.memory_bandwidth=400GB/s")
    limit = bound_of_all_like(schedule, profile)
    assert predict(schedule, profile).period_ns >= limit.period_ns
    assert limit.placed["state on CPU"] > 0.9  # the device would take longer


def test_a_state_may_be_updated_in_parts_that_were_measured_to_be_quicker() -> None:
    model, workload = shallow(2), step(1)
    p = Program(model, workload)
    state = {i: parts(4) if model.is_block(i) else (None,) for i in model.layers}
    for i in model.layers:
        p.keep_on_device(p.weight(i), p.grad(i), *(p.state(i, part) for part in state[i]))
    there_and_back(p)
    for i in model.layers:
        for part in state[i]:
            p.update(i, stream=Stream.COMPUTE, part=part)
    schedule = p.build(policy="by hand")
    verify(schedule)
    profile = hardware.override(timed(model, [workload]), ["host.memory_bandwidth=60GB/s"])
    assert profile.measured is not None and profile.measured.op_times is not None
    table = profile.measured.op_times
    cost = dict(zip(schedule.ops, demands(schedule, profile), strict=True))
    quick = {key: 0.5 * cost[schedule.ops[at]].duration_ns for at, key in timed_ops(schedule).items() if "/1 of" in key}
    # the device is slow at updates, the host is slower
    slow = {key: ns * (100 if "/adam/device" in key else 1000) for key, ns in table.values.items() if "/adam/" in key}
    values = table.values | slow | {key: 100 * ns for key, ns in quick.items()}
    profile = replace(profile, measured=Measured(op_times=replace(table, values=values)))
    limit = placement_bound(model, workload, profile)
    assert 0.9 * predict(schedule, profile).period_ns < limit.period_ns <= predict(schedule, profile).period_ns


def test_what_fits_no_tier_has_no_placement() -> None:
    model = shallow(4)
    tiny = replace(machine("h200", device_gb=1.0, host_gb=1.0), nvme=None)
    with pytest.raises(NoPlacement, match="does not fit"):
        placement_bound(model, step(1), tiny)


def test_a_solver_that_fails_is_not_taken_for_a_step_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = scipy.optimize.OptimizeResult(success=False, status=4, message="Numerical difficulties encountered.")
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *args, **options: failed)
    with pytest.raises(ArithmeticError, match="could not be solved: Numerical"):
        placement_bound(shallow(4), step(1), machine("h200", device_gb=100, host_gb=100))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(120))
def test_no_interleaving_of_micro_batches_is_faster_than_the_bound(seed: int) -> None:
    """With no byte of memory more than it takes, and whatever resource is the slow one."""
    chance = random.Random(seed)
    model, accumulation = shallow(chance.choice([1, 2, 3, 4, 6])), chance.choice([1, 2, 3, 4, 8])
    workload = step(chance.choice([1, 4, 16]), seq=chance.choice([8, 64, 512]), accumulation=accumulation)
    workload = replace(workload, recompute=chance.choice(["none", "none", "pointwise"]))
    schedule = interleaved(model, workload, chance)
    verify(schedule)
    rates = {
        "links.h2d.bandwidth": (20, "GB/s"),
        "links.d2h.bandwidth": (20, "GB/s"),
        "gpu.matmul_flops": (200, "TFLOP/s"),
        "host.adam_params_per_s": (2, "Gparams/s"),
        "nvme.read": (10, "GB/s"),
        "nvme.write": (10, "GB/s"),
    }
    slow = [f"{name}={rate * 10 ** chance.uniform(-2, 1):.6f}{unit}" for name, (rate, unit) in rates.items()]
    slow += ["gpu.memory_bandwidth=100TB/s", "host.memory_bandwidth=10TB/s", "links.duplex=1TB/s"]
    profile = hardware.override(hardware.load("rtx4090"), [*slow, "gpu.memory=1TB", "host.memory=1TB"])
    assert predict(schedule, profile).period_ns >= bound_of_all_like(schedule, profile).period_ns


@pytest.mark.parametrize(
    ("accumulation", "flops", "knobs", "close"),
    [
        # a link is the limit: micro-batches that share loads pay for no more, whatever is between their turns
        (2, 9000, {}, 0.02),
        (8, 9000, {}, 0.02),
        (8, 9000, {"offload": 28}, 0.03),
        # a drive is: it is idle in the forward, or gradients wait for it there; what buffers take is on it
        (1, 20, {"nvme": 28}, 0.08),
        (4, 20, {"nvme": 28, "nvme_slots": 2, "defer": 2}, 0.15),
        (1, 5, {"nvme": 28, "defer": 2}, 0.13),
        (4, 5, {"nvme": 28, "defer": 4}, 0.11),
    ],
)
def test_schedules_that_need_all_their_memory_come_close_to_the_bound(
    accumulation: int, flops: float, knobs: dict[str, Knob], close: float
) -> None:
    """So that a row which asks for a little too much would stand above them."""
    drive, link = ("nvme" in knobs), 100 if "nvme" in knobs else 1
    rates = (
        *(f"gpu.{name}" for name in ("memory=1TB", "memory_bandwidth=100TB/s", f"matmul_flops={flops}TFLOP/s")),
        *(f"host.{name}" for name in ("memory=1TB", "memory_bandwidth=10TB/s", "adam_params_per_s=100Gparams/s")),
        *(f"links.{name}" for name in (f"h2d.bandwidth={link}GB/s", "d2h.bandwidth=100GB/s", "duplex=1TB/s")),
        *(f"nvme.{name}=2GB/s" for name in ("read", "write")),
    )
    profile = hardware.override(hardware.load("rtx4090"), list(rates))
    model, workload = shallow(28), step(4 // accumulation if drive else 1, 512 if drive else 8, accumulation)
    tight: dict[str, Knob] = {"slots": 1, "grad_slots": 1, "keep": 0, "slabs": 1, "nvme_slots": 1, **knobs}
    schedule = policies.build("streamed", model, workload, ROOMY, **tight)
    least = bound_of_all_like(schedule, profile).period_ns
    assert least <= predict(schedule, profile).period_ns <= (1 + close) * least


def late_on_a_drive(model: ModelSpec, workload: Workload, every: int) -> Schedule:
    """All blocks' weights and states live on a drive. One block in `every` is updated beside the next forward, by the
    gradient that waited: its weights are on the drive alone between two steps, and are written in the forward."""
    p, on_host = Program(model, workload), functools.partial(Program.slots, tier=Tier.HOST)
    ends, late = (model.embed, model.head), [i for i in model.blocks if (i + 1) % every == 0]
    p.keep_on_device(*(t for i in ends for t in (p.weight(i), p.grad(i), p.state(i))))
    p.keep_on_nvme(*(t for i in model.blocks for t in (p.weight(i), p.state(i))))
    slots, grads, states, slabs = (
        p.slots("weight", 2),
        p.slots("grad", 1),
        on_host(p, "state", 2),
        on_host(p, "slab", 1),
    )
    in_forward, updated = on_host(p, "read", 1), on_host(p, "updated", 2)
    waits, ready, queue = {i: p.buffer(f"wait{i}", Tier.HOST) for i in late}, dict[int, str](), list(late)

    def read(i: int, into: Ring) -> str:
        return p.prefetch(p.weight(i), into=into.next(), stream=Stream.NVME_READ)

    def update(i: int, weights: str, grad: str, *, carried: bool) -> None:
        state = p.prefetch(p.state(i), into=states.next(), stream=Stream.NVME_READ)
        p.update(i, grad=(grad, p.grad(i)), weights=weights, state=state, carried=carried)
        p.offload(p.weight(i), out_of=weights, stream=Stream.NVME_WRITE)
        p.offload(p.state(i), out_of=state, stream=Stream.NVME_WRITE)

    def update_next() -> None:
        if queue:
            i = queue.pop(0)
            ready[i] = read(i, updated)
            update(i, ready[i], waits[i], carried=True)

    p.forward(model.embed)
    update_next()
    for i in model.blocks:
        slot = p.prefetch(p.weight(i), into=slots.next(), out_of=ready[i] if i in waits else read(i, in_forward))
        if i in waits:
            update_next()
        p.forward(i, weights=slot)
    p.loss()
    for i in reversed(model.blocks):
        there = read(i, in_forward if i in waits else updated)
        grad = grads.next()
        p.backward(i, weights=p.prefetch(p.weight(i), into=slots.next(), out_of=there), grad=grad)
        slab = p.offload(p.grad(i), out_of=grad, into=waits[i] if i in waits else slabs.next())
        if i not in waits:
            update(i, there, slab, carried=False)
    p.backward(model.embed)
    for i in ends:
        p.update(i, stream=Stream.COMPUTE)
    return p.build(policy="by hand")


def test_weights_that_are_updated_late_are_written_in_the_forward() -> None:
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=120, vocab_size=512)
    workload = step(1, seq=8, precision="bf16_8bit")
    schedule = late_on_a_drive(model, workload, every=4)
    verify(schedule)
    rates = (
        *(f"gpu.{name}" for name in ("memory=1TB", "memory_bandwidth=1000TB/s", "matmul_flops=0.018TFLOP/s")),
        *(f"host.{name}" for name in ("memory=1TB", "memory_bandwidth=1000TB/s", "adam_params_per_s=1000Gparams/s")),
        *(f"links.{name}" for name in ("h2d.bandwidth=1TB/s", "d2h.bandwidth=1TB/s", "duplex=3TB/s")),
        "nvme.read=1TB/s",
        "nvme.write=1GB/s",
    )
    profile = hardware.override(hardware.load("rtx4090"), list(rates))
    assert predict(schedule, profile).period_ns >= bound_of_all_like(schedule, profile).period_ns
