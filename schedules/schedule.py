"""A schedule: the ops of one repeating step, the buffers they use and the waits between them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from schedules.model import ModelSpec
from schedules.op import Buffer, Op, Stream, Tier, Wait
from schedules.workload import Workload

if TYPE_CHECKING:
    import networkx

FORMAT = "megatrain-schedule/1"

Knob = bool | int | float | str | None
RECORDED = "recorded"  # in place of a policy: the ops of somebody's run, as `megatrain import` writes them


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One training step that repeats: what is simulated, verified and executed, unchanged.

    `ops` stand in program order, which is also the order in which one host thread issues them. Reading them
    one after another gives the step its meaning; `waits` (with the order of each stream) must keep any
    faster execution equal to that reading. `staleness` is the number of steps by which the weights a
    forward reads may lag behind the optimizer: 0 is exact training.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    waits: tuple[Wait, ...]
    model: ModelSpec
    workload: Workload
    policy: str
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    staleness: int = 0
    format: str = FORMAT

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what is executed: ops, buffers and waits, in their canonical encoding."""
        from schedules.codec import encode_body

        return hashlib.sha256(encode_body(self)).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides what training by it computes: the digest, model, workload and staleness.

        Names apart: the policy's, its knobs' and the model's.
        """
        model = self.model.to_dict() | {"name": ""}
        all_of_it = [self.digest, model, self.workload.to_dict(), self.staleness]
        return hashlib.sha256(json.dumps(all_of_it, sort_keys=True).encode()).hexdigest()

    @property
    def short_digest(self) -> str:
        """The first eight digits, for people."""
        return self.digest[:8]

    @property
    def label(self) -> str:
        """The policy's name, marked wherever its numbers are not those of exact training."""
        return self.policy if self.staleness == 0 else f"{self.policy} (stale by {self.staleness})"

    @property
    def is_recording(self) -> bool:
        """Whether it holds what a run did, not how: it can be drawn and compared, not proven or run."""
        return self.policy == RECORDED and not self.buffers

    @cached_property
    def index(self) -> dict[str, int]:
        """Op name -> position in program order."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """Buffer name -> buffer."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def waits_of(self) -> dict[str, tuple[Wait, ...]]:
        """Op name -> its waits, for every op."""
        found: dict[str, list[Wait]] = {op.name: [] for op in self.ops}
        for wait in self.waits:
            found[wait.op].append(wait)
        return {name: tuple(waits) for name, waits in found.items()}

    @cached_property
    def waits_at(self) -> list[list[tuple[int, int]]]:
        """For each op in program order, its waits: the position of the op that it waits for, and the distance."""
        return [[(self.index[wait.on], wait.distance) for wait in self.waits_of[op.name]] for op in self.ops]

    @cached_property
    def streams(self) -> dict[Stream, tuple[Op, ...]]:
        """Stream -> its ops in order, for the streams that are used."""
        return {s: ops for s in Stream if (ops := tuple(op for op in self.ops if op.stream == s))}

    def allocated_bytes(self, tier: Tier) -> int:
        """Bytes of all buffers of a tier: what is allocated before the first step and held to the last."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.tier == tier)

    def route(self, op: Op) -> tuple[Tier, Tier]:
        """From which tier a copy comes and to which it goes."""
        (source,), (target,) = op.reads, op.writes
        return self.buffer[source.buffer].tier, self.buffer[target.buffer].tier

    def to_networkx(self) -> networkx.MultiDiGraph:
        """Ops as nodes (attribute `op`), stream order and waits as edges (attributes `why`, `distance`)."""
        import networkx

        graph = networkx.MultiDiGraph(policy=self.policy, digest=self.digest)
        for op in self.ops:
            graph.add_node(op.name, op=op)
        for stream, ops in self.streams.items():
            for before, after in itertools.pairwise(ops):
                graph.add_edge(before.name, after.name, why=f"order of {stream}", distance=0)
            graph.add_edge(ops[-1].name, ops[0].name, why=f"order of {stream}", distance=1)
        for wait in self.waits:
            graph.add_edge(wait.on, wait.op, why="wait", distance=wait.distance)
        return graph

    def describe(self) -> dict[str, Any]:
        """The facts that name this schedule in tables and results."""
        return {
            "policy": self.label,
            "model": self.model.name,
            "micro_batch_size": self.workload.micro_batch_size,
            "accumulation": self.workload.accumulation,
            "seq_len": self.workload.seq_len,
            "precision": self.workload.precision,
            "optimizer": self.workload.optimizer,
            "grad_clip": self.workload.grad_clip,
            "recompute": self.workload.recompute,
            "matmul": self.workload.matmul,
            "knobs": dict(self.knobs),
            "digest": self.digest,
            "fingerprint": self.fingerprint,
        }
