# SPDX-License-Identifier: Apache-2.0
"""Tables of `vllm-tiered dse`, the same on the terminal and in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Answer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells of a table, and a note that explains them."""

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def summary(answer: Answer) -> list[str]:
    """Return the result in three lines."""
    high, low = answer["with_prefetch"], answer["without_prefetch"]
    lines = [
        f"{name}: best L2 {side['best_l2_mib']} MiB, {side['throughput_density']:.2f} "
        f"tokens/s/mm2 as PRESERVE counts ({side['output_tokens_per_s_per_mm2']:.2f} output "
        f"tokens/s/mm2), {side['area_mm2']:.0f} mm2 a die"
        for name, side in (("With prefetch", high), ("Without", low))
    ]
    gain = high["throughput_density"] / low["throughput_density"]
    asked = answer["asked"]
    return [
        *lines,
        f"Prefetching gains {gain:.2f}x; mean of {len(asked['models'])} models on "
        f"{asked['num_devices']} devices. Modelled, nothing is measured.",
    ]


def tables(answer: Answer) -> list[Table]:
    """Return all tables of the answer; the paper's figures need the paper's own space."""
    found = []
    if "claims" in answer:
        found += [_claims(answer), _readings(answer)]
    found += [_density(answer), _latency(answer), _footprints(answer), _clusters(answer)]
    found += [_bandwidths(answer), _cubes(answer)]
    if "table_1" in answer:
        found.append(_table_1(answer))
    return found


def assumptions(answer: Answer) -> Table:
    """Return the table of assumptions made where the paper is ambiguous."""
    rows = [(each["what"], each["taken"], each["source"]) for each in answer["assumptions"]]
    headings = ("what", "taken here", "from")
    return Table(name="assumptions", title="Assumptions", headings=headings, rows=rows)


def markdown(table: Table) -> str:
    """Return the table in Markdown, without its title."""
    lines = [table.headings, ["---"] * len(table.headings), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _claims(answer: Answer) -> Table:
    return Table(
        name="claims",
        title="The paper's figures and ours",
        headings=("figure", "what", "paper", "ours", "error", "ours is"),
        rows=[
            (
                claim["where"],
                claim["what"],
                f"{claim['paper']:g} {claim['unit']}".rstrip(),
                f"{_number(claim['ours'])} {claim['unit']}".rstrip(),
                f"{claim['error']:+.1%}",
                claim["kind"],
            )
            for claim in answer["claims"]
        ],
        note="*predicted* follows from table 2 and the models' sizes; *reading* does too, but the "
        "paper can be read in several ways, and its figures 5 and 6 chose the way; *fitted*: one "
        "number was set so that it comes out; *given*: no other result was possible.",
    )


def _readings(answer: Answer) -> Table:
    return Table(
        name="readings",
        title="Other readings of figures 5 and 6",
        headings=("reading", "best L2 MiB", "with", "without", "gain", "saving %"),
        rows=[
            (
                each["reading"],
                str(each["best_l2_mib"]),
                f"{each['with_prefetch']:.2f}",
                f"{each['without_prefetch']:.2f}",
                f"{each['gain']:.3f}",
                "{:.0f} to {:.0f}, mean {:.1f}".format(*(100 * part for part in each["saving"])),
            )
            for each in answer["readings"]
        ],
        note="One choice changed at a time. Densities are output tokens/s/mm2, not scaled. The "
        "paper: 104 MB, 1.25, 20 to 36, mean 25.",
    )


def _density(answer: Answer) -> Table:
    sides = [answer[name]["throughput_density_by_l2"] for name in _SIDES]
    return Table(
        name="density",
        title="Figure 6: throughput density over the L2 size",
        headings=("L2 MiB", "die mm2", "with prefetch", "without"),
        rows=[
            (str(size), f"{area:.0f}", f"{high:.2f}", f"{low:.2f}")
            for size, area, high, low in zip(
                answer["asked"]["l2_mib"], answer["area_mm2"], *sides, strict=True
            )
        ],
        note=f"tokens/s/mm2 as the paper counts: ours times {answer['papers_per_ours']:g}, which "
        "is fitted to its 11.8.",
    )


def _latency(answer: Answer) -> Table:
    figure = answer["figure_5"]
    sizes = answer["asked"]["l2_mib"]
    shown = _few(range(len(sizes)), 9)
    curves = {**figure["latency_by_model"], "mean": figure["mean_latency"]}
    last_gains = figure["last_gain_l2_mib"]
    return Table(
        name="latency",
        title="Figure 5: latency with prefetch, over that of the smallest L2",
        headings=("L2 MiB", *(str(sizes[index]) for index in shown), "last gain at"),
        rows=[
            (name, *(f"{curve[index]:.2f}" for index in shown), str(last_gains.get(name, "")))
            for name, curve in curves.items()
        ],
    )


def _footprints(answer: Answer) -> Table:
    by_model: dict[str, dict[int, str]] = {}
    devices: set[int] = set()
    for point in answer["figure_2"]["points"]:
        text = f"{point['attention_mib']:.0f} + {point['mlp_mib']:.0f}"
        by_model.setdefault(point["model"], {})[point["num_devices"]] = text
        devices.add(point["num_devices"])
    lines = ", ".join(f"{name} {size}" for name, size in answer["figure_2"]["l2_mib"].items())
    return Table(
        name="footprint",
        title="Figure 2: MiB of attention + MLP of a layer on one device",
        headings=("devices", *map(str, sorted(devices))),
        rows=[
            (name, *(cells.get(number, "-") for number in sorted(devices)))
            for name, cells in by_model.items()
        ],
        note=f"int8, batch 8, 16k tokens. L2: {lines} MiB.",
    )


def _clusters(answer: Answer) -> Table:
    return Table(
        name="clusters",
        title="Figure 7: cluster size",
        headings=(
            "model",
            "devices",
            "speedup",
            "all-reduce us",
            "attention prefetch us",
            "FFN prefetch us",
            "of them done",
        ),
        rows=[
            (
                each["model"],
                str(each["num_devices"]),
                f"{each['speedup']:.3f}",
                *(
                    f"{each[name]:.1f}"
                    for name in ("all_reduce_us", "attention_prefetch_us", "ffn_prefetch_us")
                ),
                f"{each['attention_share']:.0%}, {each['ffn_share']:.0%}",
            )
            for each in answer["figure_7"]
        ],
        note="End to end, batch 16, 8k tokens, L2 104 MiB. Speedup of prefetching on the same "
        "cluster. Prefetches are those of all a layer's part has, done what L2 has room for.",
    )


def _bandwidths(answer: Answer) -> Table:
    points = answer["figure_8"]
    names = [*points[0]["by_model"], "mean"]
    curves = [{**point["by_model"], "mean": point["mean"]} for point in points]
    return Table(
        name="bandwidth",
        title="Figure 8: speedup over the link's Gbit/s",
        headings=("model", *(str(point["gbit_per_s"]) for point in points)),
        rows=[(name, *(f"{curve[name]:.2f}" for curve in curves)) for name in names],
        note="128 devices, L2 104 MiB, batch 16, 8k tokens.",
    )


def _cubes(answer: Answer) -> Table:
    curves = answer["figure_9"]
    return Table(
        name="cubes",
        title="Figure 9: mean speedup over arithmetic throughput",
        headings=("L2 TB/s", *(f"{number} TOPS" for number in curves[0]["tera_ops"])),
        rows=[
            (str(each["l2_tb_per_s"]), *(f"{value:.3f}" for value in each["speedups"]))
            for each in curves
        ],
        note="32 devices, L2 104 MiB, batch 16, 8k tokens. Both axes' values are ours.",
    )


def _table_1(answer: Answer) -> Table:
    table = answer["table_1"]
    errors = table["mean_errors"]
    return Table(
        name="table_1",
        title="Table 1: speedups on an Ascend 910B",
        headings=("model", "NPUs", "paper s", "paper", "unfitted", "error", "fitted", "error"),
        rows=[
            (
                row["model"],
                str(row["num_devices"]),
                f"{row['paper_without_s']:g} / {row['paper_with_s']:g}",
                f"{row['paper_speedup']:.2f}",
                f"{row['unfitted']['speedup']:.2f}",
                f"{row['unfitted']['error']:+.0%}",
                f"{row['fitted']['speedup']:.2f}",
                f"{row['fitted']['error']:+.0%}",
            )
            for row in table["rows"]
        ],
        note=f"Mean error of the speedup: {errors['unfitted']:.1%} unfitted; with four overheads "
        f"fitted to {table['fitted_on']}'s rows {errors['fitted_other_models']:.1%} on the other "
        f"models'. Saying the table's mean everywhere would err by {errors['constant']:.1%}.",
    )


_SIDES = ("with_prefetch", "without_prefetch")


def _number(value: float) -> str:
    return f"{value:g}" if float(value).is_integer() else f"{value:.3g}"


def _few(items: Iterable[int], most: int) -> list[int]:
    """Return about `most` of the items, evenly spaced, always with the last one."""
    every = list(items)
    step = -(-len(every) // most)
    return sorted({*every[::step], every[-1]})
