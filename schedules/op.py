"""What one step of training is made of: ops, the buffers they touch, and the waits between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from schedules.tensor import OUTPUT, QUANTISED, parse


class Kind(StrEnum):
    """The four kinds of op, the field's own words."""

    PREFETCH = "prefetch"  # toward the GPU: NVMe to host, host to device
    COMPUTE = "compute"  # the model's forward and backward work
    OFFLOAD = "offload"  # away from the GPU: device to host, host to NVMe
    UPDATE = "update"  # the optimizer and its passes over gradients and states, wherever they run


class Phase(StrEnum):
    """What an op does to the tensors it names. The executor's table of (kind, phase) gives the code."""

    COPY = "copy"  # the one tensor read is copied to the buffer written
    EMBED = "embed"  # token embedding, forward
    FORWARD = "forward"
    RECOMPUTE = "recompute"  # a forward run again for its activations, its output, or both
    LOSS = "loss"  # final norm, head and cross-entropy, forward and backward in one pass
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"  # add a gradient to another (a plain store where the target is not read)
    CAST = "cast"  # copy with a change of element type
    ZERO = "zero"  # clear a gradient whose contents are no longer needed
    NORM = "norm"  # add the squares of gradients to the global norm
    SCALE = "scale"  # multiply gradients by the clipping coefficient (by one without clipping)
    ADAM = "adam"  # the optimizer's step on one layer
    SYNC = "sync"  # no work: the issuing host waits until the named tensors are ready


class Stream(StrEnum):
    """The queues. Ops of one stream run one after another, in the order they were issued."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    CPU = "cpu"  # optimizer workers on the host
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    HOST = "host"  # the issuing thread itself: it issues nothing while it works


DEVICE_STREAMS = (Stream.H2D, Stream.COMPUTE, Stream.D2H)  # queues of the GPU; the others are threads of the host
DRIVE_STREAMS = (Stream.NVME_READ, Stream.NVME_WRITE)  # threads of the host that copy to and from a drive, no more


class Tier(StrEnum):
    """Where a buffer lives."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A named, static allocation of `nbytes` bytes in one tier; it holds one tensor at a time."""

    name: str
    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True, order=True)
class Access:
    """A buffer together with the tensor it is expected to hold: *slot 0, holding the weights of layer 7*."""

    buffer: str
    tensor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One unit of work queued on one stream.

    `reads` and `writes` decide everything that is derived: edges, waits, races, memory. An op that both
    reads and writes a gradient adds to it. The demand is in amounts, never in time:

    nbytes: of a copy its payload, of an update the traffic of the memory that it runs in, of a compute op that of the
        device's memory.
    flops: those executed, causal attention counted once.
    params: parameters touched.
    fresh: bytes written into host memory that the process has only now been given, page by page.
    """

    name: str
    kind: Kind
    phase: Phase
    stream: Stream
    layer: int | None = None
    microbatch: int | None = None
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    nbytes: int = 0
    flops: int = 0
    params: int = 0
    fresh: int = 0
    blocking: bool = False  # the host waits for it before it issues the next op

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Reads, then writes."""
        return self.reads + self.writes

    @property
    def on_device(self) -> bool:
        """Whether a queue of the GPU runs it, not a thread of the host."""
        return self.stream in DEVICE_STREAMS

    @property
    def makes_output(self) -> bool:
        """Whether it writes a layer's output."""
        return any(parse(access.tensor).cls == OUTPUT for access in self.writes)

    @property
    def reads_quantised(self) -> bool:
        """Whether it computes with quantised weights, and so makes each matrix whole that it multiplies with."""
        return self.kind == Kind.COMPUTE and any(parse(access.tensor).cls == QUANTISED for access in self.reads)

    @property
    def takes_workspace(self) -> bool:
        """Whether it may allocate device memory beside its buffers for as long as it runs."""
        return self.kind == Kind.COMPUTE or (self.phase == Phase.ADAM and self.on_device)

    def reads_from(self, buffer: str) -> bool:
        """Whether the op reads any tensor in `buffer`."""
        return any(access.buffer == buffer for access in self.reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """`op` starts only after `on` has finished: of the same step (distance 0) or the one before (1)."""

    op: str
    on: str
    distance: int = 0
