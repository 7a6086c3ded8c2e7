"""Commands that list what is known: models, hardware, policies."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from megatrain.cli.options import Json, Set, machine_of, print_json, require_outputs, stages


def models(
    name: Annotated[str | None, typer.Argument(help="A model's name or config.json; all if left out.")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in models, or describe one."""
    from megatrain.terminal import print_table
    from schedules import presets

    chosen = [name] if name else presets.names()
    specs = [presets.load(model) for model in chosen]
    if as_json:
        print_json([{**spec.to_dict(), "total_params": spec.total_params} for spec in specs])
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
    print_table("models (parameters; heads as query/key-value)", columns, rows, spare=columns[4:])


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
                str(p.host.memory),
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
        print(f"measured with {chosen.versions}, on {chosen.date}")


def policies(
    name: Annotated[str | None, typer.Argument(help="A policy's name or file; all if left out.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a page per policy to this folder.")] = None,
    as_json: Json = False,
) -> None:
    """List the policies, or explain one: its knobs, its bytes, its speed and a picture of a step."""
    from megatrain.terminal import print_table
    from schedules import policies as known

    require_outputs(folders=[out])
    if as_json:
        print_json([_record(policy) for policy in known.names()] if name is None else _record(name))
    if out is not None:
        from analysis import policy_pages

        chosen = [name] if name else known.names()
        with stages() as begin:
            begin("simulating and drawing")
            policy_pages.write(out, chosen)
        if not as_json:
            print(f"{len(chosen)} pages written to {out}")
        return
    if as_json:
        return
    if name is None:
        rows = [[policy, known.summary(policy)] for policy in known.names()]
        print_table("policies", ["policy", "what it does"], rows, left=2)
        return
    from analysis import policy_pages

    page = policy_pages.page(name)
    print(page.words, "", *policy_pages.drawing(page), "", sep="\n")
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
