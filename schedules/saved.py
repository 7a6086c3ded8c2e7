"""How many bytes the activations of one micro-batch take: a layer's output, and what a block keeps for its backward."""

from __future__ import annotations

from schedules.model import FP32, ModelSpec
from schedules.workload import Workload


def hidden_bytes(model: ModelSpec, workload: Workload) -> int:
    """Bytes of a layer's output (tokens, hidden_size), and of its gradient."""
    return workload.tokens_per_microbatch * model.hidden_size * workload.bytes.activation


def saved_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """Bytes that block i keeps from forward for its backward, without its input and its weights.

    Per token, in activation elements (h hidden, q, k and v widths, a what attention returns, f MLP width):
      h        normalised input, read by the q, k, v projections; unless computed again; with pre_norm only
      q + k + v  queries and keys after rotary and values, read by attention
      a        attention output, read by attention's backward and by the o projection
      q + k    queries and keys before their norm, with a norm of these only; values, too, with value_norm, if apart
      2a       the gate of attention's output, and what it lets through, unless computed again
      of a recurrence in place of these what its convolution mixes, what its gates are made of, what it returns, what
               gates that, and the product of the two, unless computed again
      what latent attention compresses queries, keys and values to; and of that what has a norm, normalised, read by
               the projections that expand it, unless computed again
      2h       attention's and the MLP's output before their norms, with post_norm only
      h        residual sum after attention, the second norm's input or the MLP's, unless a block is one of the two
      h        its normalised value, read by gate and up, or by the router, unless that is frozen and no expert is
               shared; unless computed again; with pre_norm only
      k h      copies of that, one per choice, with experts only; unless computed again or experts are frozen
      3f       gate, up, and their product, shared experts' too, without a gate 2f; f less if the product is computed
               again, that of frozen experts less, none if all is
      k h      the experts' outputs, if weighted by the router, with experts only; of a latent vector in place of h
               these two, and what they add up to, and if the copies are computed again what they are of, unless
               experts are frozen
      h + 1    the shared experts' output and its gate, with a shared_expert_gate only
      3h       with experts beside an MLP what the two return, before their norms, and what the router is given,
               normalised, unless it is frozen or that is computed again
      rank     per adapter, what lies between its two matrices
    and in fp32: 1 per norm row (its reciprocal root mean square), 1 per head (attention's logsumexp),
    and with experts their probabilities and, per choice, its weight, its expert and its place (3 words).
    Rotary needs only its shared cos and sin table. Embedding and head keep nothing: the head's backward
    is in the loss op, the embedding's reads the token ids.
    """
    if not model.is_block(i):
        return 0
    h, f, k = model.hidden_size, model.mlp_width(i), model.num_experts_per_tok
    elements, words = _kept_by_attention(model, i, workload)
    elements += (model.branches(i) - 1) * h
    elements += {"none": model.mlp_matrices, "pointwise": model.mlp_matrices - 1, "mlp": 0}[workload.recompute] * f
    words += model.branches(i) * (model.pre_norm + model.post_norm)
    if model.pre_norm and workload.recompute == "none":
        by_router_alone = model.has_experts(i) and not (model.n_shared_experts or model.moe_latent_size)
        elements += (model.branches(i) - (by_router_alone and workload.lora_rank is not None)) * h
    if model.post_norm:
        elements += 2 * h
    if model.experts_beside_mlp:
        elements += 2 * h + (h if workload.recompute == "none" and workload.lora_rank is None else 0)
        words += 4
    if model.has_experts(i):
        frozen, all_kept = workload.lora_rank is not None, workload.recompute == "none"
        of_choice = (all_kept and not frozen) + (not model.experts.weights_inputs)
        elements += of_choice * k * model.expert_input
        elements -= f - model.shared_width if all_kept and frozen else 0
        elements += (1 if all_kept or frozen else 2) * model.moe_latent_size
        elements += h + 1 if model.shared_expert_gate else 0
        words += model.num_experts + 3 * k
    if workload.lora_rank is not None:
        kept = [name for name in model.adapter_shapes(i, workload.lora_rank) if name.endswith("lora_A.weight")]
        if workload.recompute == "mlp":
            kept = [name for name in kept if not name.startswith("mlp.")]
        elements += workload.lora_rank * len(kept)
    return workload.tokens_per_microbatch * (elements * workload.bytes.activation + words * FP32)


def _kept_by_attention(model: ModelSpec, i: int, workload: Workload) -> tuple[int, int]:
    """Elements, and words in fp32, that block i's attention keeps of a token, without its normalised input."""
    all_kept = workload.recompute == "none"
    if (recurrence := model.recurrence(i)) is not None:
        values = recurrence.value_width * (2 + all_kept)
        return recurrence.mixed + recurrence.gates + values, recurrence.norms
    heads = model.heads(i)
    q, k, v = heads.q_width, heads.k_width, heads.v_width
    elements, words = q + k + v + heads.attended_width + heads.gate_width * (1 + all_kept), heads.count
    if model.has_qk_norm(i):
        elements += q + k
        words += 2 if model.qk_norm_all_heads else heads.count + heads.of_keys
    if model.value_norm:
        elements += 0 if heads.values_are_keys else v  # else it is the keys' that is kept
        words += heads.of_keys
    if (latent := model.latent) is not None:
        elements += latent.compressed + (latent.normed if all_kept else 0)
        words += latent.norms
    return elements, words
