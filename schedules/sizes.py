"""How many bytes a tensor of the language has, for a model and a workload."""

from __future__ import annotations

from schedules import tensor as tensors
from schedules import trained
from schedules.model import FP32, ModelSpec
from schedules.optimizer import state_bytes
from schedules.quantised import is_quantised, quantised_bytes
from schedules.saved import hidden_bytes, saved_bytes
from schedules.tensor import TensorError, parse
from schedules.workload import Workload

NORM_BYTES = 8  # the sum of squares is kept in fp64


def tensor_bytes(tensor: str, model: ModelSpec, workload: Workload) -> int:
    """Bytes of `tensor` at the workload's precision.

    Raises:
        TensorError: the name is not of the language, or nothing of that name is trained.
        InputError: the model has no such layer, or the layer no such part.
    """
    name, precision = parse(tensor), workload.bytes
    if name.cls == tensors.NORM:
        return NORM_BYTES
    layer = model.layer_index(name.layer)
    if name.cls == tensors.SAVED:
        return saved_bytes(model, layer, workload)
    if name.cls in tensors.MICROBATCH_CLASSES:
        return hidden_bytes(model, workload)
    if name.cls == tensors.WEIGHT:
        return model.params(layer) * precision.weight
    if name.cls == tensors.QUANTISED:
        if not is_quantised(model, layer, workload):
            why = "the workload quantises nothing" if model.is_block(layer) else "only blocks are quantised"
            raise TensorError(f"layer {name.layer} has no quantised weights {tensor}: {why}")
        return quantised_bytes(model, layer, workload)
    if name.cls == tensors.ADAPTER and not (workload.lora_rank is not None and model.is_block(layer)):
        why = "the workload has no lora_rank" if model.is_block(layer) else "only blocks have adapters"
        raise TensorError(f"layer {name.layer} has no adapters {tensor}: {why}")
    of = trained.span(model, workload, layer, name.part)
    if name.cls == tensors.STATE:
        return state_bytes(model, workload, layer, of.stop - of.start)
    per_param = {
        tensors.ADAPTER: precision.weight,
        tensors.GRAD: precision.grad,
        tensors.GRAD32: FP32,
    }[name.cls]
    params: int = of.stop - of.start
    return params * per_param
