# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered plan MODEL`: predict a model's fit, placement and speed.

It reads the model's configuration and no weights: vLLM builds its own class of the model without
memory, so that sizes are the engine's. It prints every figure of the machine with its kind and
source, and the command that serves what it has planned.
"""

import argparse
import json

from rich.console import Console

from vllm_tiered.cli import plan_tables
from vllm_tiered.cli.plan_arguments import add_arguments
from vllm_tiered.cli.plan_commands import placement_command, slots_command
from vllm_tiered.cli.plan_ffn import StorePlan, plan_store
from vllm_tiered.cli.plan_json import to_json
from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.assumptions import describe_gemms
from vllm_tiered.planner.built_model import built_shape
from vllm_tiered.planner.card_memory import CardMemory, near_memory
from vllm_tiered.planner.expert_slots import NAME as SLOTS
from vllm_tiered.planner.fit import Fit
from vllm_tiered.planner.from_probe import load_machine
from vllm_tiered.planner.machine import Figures
from vllm_tiered.planner.memory_split import target_for
from vllm_tiered.planner.pareto import pareto_front
from vllm_tiered.planner.plan import Case, Plan
from vllm_tiered.planner.serving import Limits, Workload
from vllm_tiered.planner.suggestions import suggest
from vllm_tiered.units import format_bytes, gib_to_bytes

DOES_NOT_FIT = 3


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `plan` to the subcommands of `vllm-tiered`."""
    parser = subcommands.add_parser(
        "plan",
        help="predict whether a model fits, where its weights go, and its speed",
        description="Predict from a model's configuration which placements of its weights fit, and "
        "their speed. Exits 0 if a placement fits, 3 if none does.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every placement; return 0 if one fits, else 3."""
    case, card, figures = _read(args)
    plan = case.plan()
    store = plan_store(args, plan) if args.ffn_store else None
    if args.json:
        print(json.dumps(to_json(args, plan, card, figures, store), indent=2))
    else:
        _print(args, plan, card, figures, store)
    return 0 if plan.fits else DOES_NOT_FIT


def _read(args: argparse.Namespace) -> tuple[Case, CardMemory | None, Figures]:
    """Return what is asked, the division of the card's memory, and the machine's figures."""
    shape = built_shape(
        args.model,
        dtype=args.dtype,
        tensor_parallel=args.tensor_parallel_size,
        compress=args.compress,
    )
    load = Workload(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        max_requests=args.max_num_seqs,
        max_batched_tokens=args.max_num_batched_tokens,
    )
    if load.max_batched_tokens < load.max_requests:
        raise ConfigError(
            f"--max-num-batched-tokens {load.max_batched_tokens} is less than --max-num-seqs "
            f"{load.max_requests}, which vLLM refuses: raise the one or lower the other"
        )
    if shape.max_model_len is not None and load.tokens > shape.max_model_len:
        raise ConfigError(
            f"{load.prompt_tokens} prompt and {load.output_tokens} output tokens are more than the "
            f"{shape.max_model_len} of which the model is capable: lower --prompt-tokens"
        )
    machine, figures = load_machine(args.machine)
    far_bytes, tiers = gib_to_bytes(args.far_gib), machine.far_tiers
    if tiers and far_bytes > tiers.capacity_bytes:
        raise ConfigError(
            f"--far-gib {args.far_gib:g} is more than the {format_bytes(tiers.capacity_bytes)} of "
            f"far memory that {args.machine} has in {', '.join(tier.name for tier in tiers)}: "
            "lower it, or give the machine's tiers more capacity_gib"
        )
    card = None
    if args.card_gib is not None:
        card = near_memory(gib_to_bytes(args.card_gib), shape, load)
    case = Case(
        shape=shape,
        machine=machine,
        load=load,
        near_bytes=card.near_bytes if card else gib_to_bytes(args.near_gib),
        far_bytes=far_bytes,
        target=args.target or target_for(load.max_requests),
        has_storage=args.storage,
        limits=Limits(
            ttft_seconds=args.max_ttft,
            tbt_seconds=None if args.max_tbt is None else args.max_tbt / 1e3,
        ),
    )
    return case, card, figures


def _print(
    args: argparse.Namespace,
    plan: Plan,
    card: CardMemory | None,
    figures: Figures,
    store: StorePlan | str | None,
) -> None:
    console, case = plan_tables.make_console(), plan.case
    for line in plan_tables.model_lines(case.shape, case.load):
        console.print(line, soft_wrap=True)
    if card:
        console.print(card.describe(), soft_wrap=True)
    best, slots = plan.chosen, plan.best_slots
    name = SLOTS if slots else best.placement if best else None
    intensity = args.carbon_intensity
    console.print(plan_tables.placements_table(plan.results, plan.slots, name, intensity))
    for result in plan.not_fitting:
        line = f"{result.placement} does not fit: {result.reason}"
        console.print(line, soft_wrap=True)
    if slots:
        _print_command(console, plan, SLOTS, slots_command(args, case.load, slots))
        swapping = plan_tables.swapping_line(slots.swapped, slots.served, case.load)
        for line in (*plan_tables.slots_lines(slots), swapping):
            console.print(line, soft_wrap=True)
        console.print()
    elif best:
        _print_chosen(console, args, plan, best)
    if store is not None:
        for line in plan_tables.store_lines(store, case.target):
            console.print(line, soft_wrap=True)
        console.print()
    if args.pareto:
        front = pareto_front(plan.results, plan.slots)
        console.print(plan_tables.pareto_table(front, intensity))
        console.print()
    if args.suggest or not plan.fits:
        for line in plan_tables.suggestion_lines(suggest(case), fits=plan.fits):
            console.print(line, soft_wrap=True)
    has_power = case.machine.power is not None
    for line in plan_tables.machine_lines(args.machine, figures, has_power):
        console.print(line, soft_wrap=True)
    if has_power:
        console.print(f"At {intensity:g} gCO2e per kWh (--carbon-intensity).")


def _print_chosen(console: Console, args: argparse.Namespace, plan: Plan, best: Fit) -> None:
    load = plan.case.load
    _print_command(console, plan, best.placement, placement_command(args, load, best))
    line = plan_tables.swapping_line(best.swapped, best.split.served, load)
    console.print(line, soft_wrap=True)
    if auto := plan_tables.auto_line(plan):
        console.print(auto, soft_wrap=True)
    if plan.case.machine.far_tiers:
        console.print(plan_tables.far_tiers_line(best, plan.case.machine), soft_wrap=True)
    console.print()
    console.print(plan_tables.batches_table(best, args.carbon_intensity))
    console.print()
    console.print(plan_tables.sublayers_table(plan.bottlenecks(best), why=args.why))
    if args.why:
        if assumed := describe_gemms(plan.case.shape, plan.case.machine):
            console.print(assumed, soft_wrap=True)
        console.print(plan_tables.far_line(plan.with_unbounded_far(best)))
        if host := plan.host():
            console.print(host.describe(), soft_wrap=True)
    console.print()


def _print_command(console: Console, plan: Plan, name: str, words: list[str]) -> None:
    console.print()
    console.print(f"* for {plan.case.target}: {name}, as served by", soft_wrap=True)
    console.print()
    console.print(f"  {' '.join(words)}", soft_wrap=True)
    console.print()
