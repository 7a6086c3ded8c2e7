"""Commands that list what is known: models, hardware, policies."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatrain.cli.bars import stages
from megatrain.cli.options import Json, Set, machine_of, print_json, require_outputs
from schedules.delta import DeltaNet
from schedules.errors import InputError
from schedules.kimi_delta import KimiDelta
from schedules.model_checks import DENSE, NONE

if TYPE_CHECKING:
    from schedules.model import ModelSpec


def models(
    name: Annotated[str | None, typer.Argument(help="A model's name or config.json; all if left out.")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in models, or describe one."""
    from megatrain.terminal import print_table
    from schedules import presets
    from sim.units import scaled

    chosen = presets.names() if name is None else [name]
    specs = [presets.load(model) for model in chosen]
    if as_json:
        print_json([{**spec.to_dict(), "total_params": spec.total_params, "bytes": _bytes(spec)} for spec in specs])
        return
    if name is not None:
        (spec,) = specs
        print_table(f"{spec.name}: {spec.architecture}", ["", ""], _shape(spec))
        kept = _bytes(spec)
        headings = ["precision", "weights", "gradients", "optimizer state", "together", "a parameter"]
        print_table(
            "bytes of the model and of what is kept to train it",
            headings,
            [
                [
                    precision,
                    *(scaled(nbytes, "GB", 2) for nbytes in parts.values()),
                    scaled(sum(parts.values()), "GB", 2),
                    f"{sum(parts.values()) / spec.total_params:.3g} B",
                ]
                for precision, parts in kept.items()
            ],
        )
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
            f"{spec.params(spec.largest_block):,}",
            f"{spec.params(spec.embed):,}",
            "tied" if spec.tie_word_embeddings else f"{spec.params(spec.head):,}",
        ]
        for spec in specs
    ]
    print_table("models (parameters; heads as query/key-value)", columns, rows, spare=columns[4:])


def _shape(spec: ModelSpec) -> list[list[str]]:
    sliding = [window for i in spec.blocks if (window := spec.window(i)) is not None]
    attend = [i for i in spec.blocks if spec.has_attention(i) and spec.recurrence(i) is None]
    plain = [i for i in attend if not spec.has_rope(i)]
    mlp = f"{spec.intermediate_size:,} wide"
    if spec.num_experts:
        each = f"{spec.num_experts} experts, each {spec.moe_intermediate_size:,} wide"
        each += f" and given {spec.moe_latent_size:,} numbers" if spec.moe_latent_size else ""
        grouped = f", from {spec.topk_group} of {spec.n_group} groups" if spec.topk_group < spec.n_group else ""
        mlp = f"{each}, {spec.num_experts_per_tok} for a token{grouped}"
        if spec.n_shared_experts:
            mlp += f"{',' if grouped else ''} and {spec.n_shared_experts} for all"
    sizes = Counter(spec.params(i) for i in spec.blocks)
    if NONE in spec.mlp_layer_types:
        mlp += f", in {sum(map(spec.has_mlp, spec.blocks))} blocks"
    blocks = ", ".join(f"{count} of {params:,}" for params, count in sizes.items()) + " parameters"
    if dense := spec.first_k_dense_replace:
        blocks += f", the first {dense} without experts"
    elif spec.num_experts and (dense := spec.mlp_layer_types.count(DENSE)):
        blocks += f", {dense} without experts"
    heads = f"{spec.num_attention_heads} query heads, {spec.num_key_value_heads} key and value heads of {spec.head_dim}"
    if spec.global_head_dim:
        heads += f"; without a window {spec.num_global_key_value_heads} of {spec.global_head_dim}"
        heads += ", values made of keys" if spec.attention_k_eq_v else ""
    if (latent := spec.latent) is not None:
        of_queries = f"queries from {latent.q_rank:,} numbers, " if latent.q_rank else ""
        heads = f"{latent.heads} heads of {spec.head_dim}, values of {latent.value}"
        heads += f"; {of_queries}keys and values from {latent.kv_rank:,} and {latent.rope} "
        heads += "turned" if any(map(spec.has_rope, attend)) else "for all heads"
    recurrences = [found for i in spec.blocks if (found := spec.recurrence(i)) is not None]
    linear = []
    if recurrences:
        of = recurrences[0]
        if isinstance(of, DeltaNet):
            each = f"{of.value_heads} value heads of {of.value_dim}, {of.key_heads} query and key heads of {of.key_dim}"
            each += ", whose channels decay apart" if isinstance(of, KimiDelta) else ""
        else:
            groups = f", in {of.groups} groups" if of.groups > 1 else ""
            each = f"{of.heads} heads of {of.head_dim}{groups}, states of {of.state_dim}"
        what = "linear attention" if isinstance(of, DeltaNet) else "state spaces"
        linear = [[what, f"in {len(recurrences)} blocks: {each}"]]
    some = []
    if longest := spec.longest_sequence:
        what = "sparse attention" if spec.index_topk else "attention in chunks"
        some = [[what, f"to {longest:,} tokens: sequences of more are not trained"]]
    return [
        ["parameters", f"{spec.total_params:,}"],
        ["blocks", blocks],
        ["hidden size", f"{spec.hidden_size:,}"],
        ["MLP", mlp],
        ["attention", heads],
        *linear,
        *([["sliding window", f"{sliding[0]:,} tokens, in {len(sliding)} blocks"]] if sliding else []),
        *([["no rotary embedding", f"in {len(plain)} blocks"]] if plain else []),
        ["vocabulary", f"{spec.vocab_size:,}"],
        ["embedding", f"{spec.params(spec.embed):,} parameters"],
        ["head", "the embedding's" if spec.tie_word_embeddings else f"{spec.params(spec.head):,} parameters"],
        ["longest sequence", f"{spec.max_position_embeddings:,} tokens"],
        *some,
    ]


def _bytes(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """By precision, what is kept of each kind; systems may keep more, such as fp32 gradients."""
    from schedules.workload import PRECISIONS

    return {
        name: {
            "weights": kept.weight * spec.total_params,
            "gradients": kept.grad * spec.total_params,
            "optimizer_state": sum(kept.state_bytes(spec.params(i)) for i in spec.layers),
        }
        for name, kept in PRECISIONS.items()
    }


def hardware(
    name: Annotated[str | None, typer.Argument(help="A machine's name or profile file; all if left out.")] = None,
    change: Set = None,
    as_json: Json = False,
) -> None:
    """List the built-in machines, or every number of one with its source."""
    from megatrain.terminal import print_table
    from sim import hardware as machines
    from sim import machine

    if name is None:
        if change:
            raise InputError(f"--set {change[0]} is for one machine: name it")
        profiles = [machines.load(known) for known in machines.names()]
        if as_json:
            print_json([machines.to_json(known) for known in profiles])
            return
        rows = [
            [
                p.name,
                p.description,
                str(p.gpu.memory),
                str(p.gpu.matmul_flops),
                str(p.links.h2d.bandwidth),
                str(p.host.memory) if p.unified_memory is None else "the same",
            ]
            for p in profiles
        ]
        headings = ["machine", "description", "device memory", "peak bf16", "H2D", "host memory"]
        print_table("machines", headings, rows, left=2, spare=["description"])
        return
    chosen = machine_of(name, change)
    if as_json:
        print_json(machines.to_json(chosen))
        return
    rows = [list(row) for row in machine.listing(chosen)]
    headings = ["number", "value", "meaning", "source"]
    print_table(f"{chosen.name}: {chosen.description}", headings, rows, left=4)
    for meaning, several in machine.readings(chosen):
        print_table(meaning, ["", "least", "median", "most"], [list(row) for row in several])
    if chosen.versions is not None:
        way = f", ops {chosen.way}" if chosen.way else ""
        print(f"measured with {chosen.versions}{way}, on {chosen.date}")


def policies(
    name: Annotated[
        str | None,
        typer.Argument(help='A policy\'s name or file, with any knobs: "streamed slots=3"; all if left out.'),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page per policy to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """List the policies, or explain one: its knobs, its bytes, its speed and a picture of a step."""
    from megatrain.terminal import print_table, print_words, terminal_columns
    from schedules import policies as known

    require_outputs(folders=[out])
    if as_json:
        print_json([_record(policy) for policy in known.names()] if name is None else _whole_record(name))
    if out is not None:
        from analysis import policy_pages

        chosen = known.names() if name is None else [name]
        with stages() as begin:
            begin("simulating and drawing")
            policy_pages.write(out, chosen)
        if not as_json:
            print(f"{len(chosen)} page{'s' * (len(chosen) > 1)} written to {out}")
        return
    if as_json:
        return
    if name is None:
        rows = [[policy, known.summary(policy)] for policy in known.names()]
        print_table("policies", ["policy", "what it does"], rows, left=2)
        return
    from analysis import policy_pages

    page = policy_pages.page(name)
    print_words(page.words)
    for line in ["", *policy_pages.drawing(page, terminal_columns()), ""]:
        print_words(line)
    print_table(
        f"where states live, in bytes per parameter: {policy_pages.about(page.numbers)}",
        policy_pages.STATES_HEADING,
        policy_pages.states(page.numbers),
    )
    print_table("how fast, the same step", policy_pages.SPEED_HEADING, policy_pages.speed(name))


def _record(policy: str) -> dict[str, Any]:
    """A policy for programs; the value of a knob is its default, None too where it has none."""
    from schedules import policies as known

    defaults = {name: knob.default for name, knob in known.knobs(policy).items()}
    return {
        "policy": policy,
        "summary": known.summary(policy),
        "trains": known.trains(policy),
        "knobs": {name: None if value is inspect.Parameter.empty else value for name, value in defaults.items()},
    }


def _whole_record(policy: str) -> dict[str, Any]:
    """And what is told of one alone: what its knobs accept and mean, and the numbers of its page."""
    from analysis import policy_pages
    from schedules import policies as known

    name, _ = known.with_knobs(policy)
    told = {knob: {"accepts": accepts, "help": text} for knob, (accepts, text) in known.knob_help(name).items()}
    return {**_record(name), "knob_help": told, **policy_pages.record(policy)}
