"""How much an op does: its bytes, FLOPs and parameters, which follow from what it touches."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from schedules import optimizer, trained
from schedules import tensor as tensors
from schedules.flops import op_flops
from schedules.model import ModelSpec
from schedules.op import Phase
from schedules.quantised import made_whole_bytes, whole_at_once_bytes
from schedules.sizes import tensor_bytes
from schedules.tensor import Part, parse
from schedules.traffic import op_bytes
from schedules.workload import Workload
from schedules.workspace import workspace_bytes


class Amounts:
    """The amounts of a model's ops in a workload. Those asked for before are remembered."""

    def __init__(self, model: ModelSpec, workload: Workload) -> None:
        self._model, self._workload = model, workload
        self._nbytes: dict[str, int] = {}
        self._computed: dict[tuple[str, Phase, bool, bool, bool], tuple[int, int]] = {}
        self._workspace: dict[tuple[str, Phase, bool, bool], int] = {}
        self._updated: dict[tuple[int | None, Phase, Part | None, tuple[str, ...]], tuple[int, int, int]] = {}

    def tensor(self, name: str) -> int:
        """Bytes of a tensor, and so of its copy. Raises InputError as `tensor_bytes` does."""
        if name not in self._nbytes:
            self._nbytes[name] = tensor_bytes(name, self._model, self._workload)
        return self._nbytes[name]

    def compute(self, i: int, phase: Phase, *, output: bool, fused: bool, quantised: bool = False) -> tuple[int, int]:
        """FLOPs of a compute op on layer i, and bytes that it moves through device memory. Raises ModelError.

        `output`: it makes the layer's output; `quantised`: it makes weights whole.
        """
        key = self._model.layer_kind(i), phase, output, fused, quantised
        if key not in self._computed:
            flops = op_flops(self._model, i, phase, self._workload, output=output)
            nbytes = op_bytes(self._model, i, phase, self._workload, fused=fused, output=output)
            nbytes += made_whole_bytes(self._model, i, self._workload) if quantised else 0
            self._computed[key] = flops, nbytes
        return self._computed[key]

    def workspace(self, i: int, phase: Phase, *, output: bool = True, quantised: bool = False) -> int:
        """Bytes that a compute op on layer i, or the optimizer's step on the device, takes beside its buffers."""
        key = self._model.layer_kind(i), phase, output, quantised
        if key not in self._workspace:
            taken = workspace_bytes(self._model, i, phase, self._workload, output=output)
            taken += whole_at_once_bytes(self._model, i, self._workload) if quantised else 0
            self._workspace[key] = taken
        return self._workspace[key]

    def update(self, i: int | None, phase: Phase, touched: Iterable[str], part: Part | None) -> tuple[int, int, int]:
        """Parameters of an update of a part of layer i, its FLOPs, and the bytes that it reads and writes.

        None stands for no layer, and for all of one. Of tensors that have no parts a part has its share.
        """
        names = tuple(touched)
        key = i, phase, part, names
        if key not in self._updated:
            params, nbytes = self._passed_over(i, names, part)
            flops = 0
            if phase == Phase.ADAM and i is not None:
                flops = optimizer.step_flops(self._model, self._workload, i)
                nbytes += optimizer.step_bytes(self._model, self._workload, i)
            self._updated[key] = params, flops, nbytes
        return self._updated[key]

    def _passed_over(self, i: int | None, touched: tuple[str, ...], part: Part | None) -> tuple[int, int]:
        if i is None:
            return 0, sum(map(self.tensor, touched))
        if any(parse(name).cls == tensors.QUANTISED for name in touched):
            return self._model.params(i), sum(map(self.tensor, touched))
        of = trained.span(self._model, self._workload, i, part)
        params: int = of.stop - of.start
        if part is None:
            return params, sum(map(self.tensor, touched))
        whole = trained.params(self._model, self._workload, i)

        def share(name: str) -> int:
            is_whole = parse(name).part is not None or name == tensors.NORM
            return self.tensor(name) if is_whole else self.tensor(name) // whole * params

        return params, sum(map(share, touched))


amounts_of = functools.lru_cache(maxsize=4)(Amounts)  # a planner writes hundreds of programs of one step
