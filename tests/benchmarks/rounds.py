# SPDX-License-Identifier: Apache-2.0
"""Made-up rounds whose figures can be worked out by hand."""

from benchmarks import summary
from benchmarks.jobs import ExpansionAt, RequestTimes, RoundResult


def make_round(
    label="vLLM alone",
    *,
    seconds=2.0,
    tiered=False,
    expansion=2.0,
    preemptions=0.0,
    output_token_ids=((1, 2, 3), (4,)),
    tpot_s=0.1,
    foreign_cpu_share=0.0,
    levels=(),
    level_changes=0.0,
    num_steps=10,
    rss_mib=3,
    integrity_checks=0,
):
    """One round of a request of 3 tokens (first at 0.5 s) and one of 1 token (at 1.5 s).

    `levels` are pairs of engine step and expansion from then on; and anything if tails are far.
    """
    counters = {summary.PREEMPTIONS: preemptions}
    gauges = {}
    if tiered:
        counters |= {
            summary.STEPS: float(num_steps),
            summary.LEVEL_CHANGES: level_changes,
            summary.STEP_SECONDS: 2.0,
            summary.STALL_SECONDS: 0.01,
            summary.BOOKKEEPING_SECONDS: 0.1,
            summary.READ_BYTES: 5e9,
            summary.WRITE_BYTES: 1e9,
            summary.READ_SECONDS: 1.0,
            summary.WRITE_SECONDS: 0.5,
        }
        gauges[summary.EXPANSION] = expansion
    return RoundResult(
        label=label,
        tiered=tiered,
        seconds=seconds,
        num_prompt_tokens=20,
        num_output_tokens=400,
        num_steps=num_steps,
        num_blocks=64,
        peak_blocks=60,
        peak_in_flight=2,
        rss_bytes=rss_mib * 2**20,
        foreign_cpu_share=foreign_cpu_share,
        requests=[
            RequestTimes(
                arrival_s=0.25,
                first_token_s=0.5,
                last_token_s=0.5 + 2 * tpot_s,
                num_output_tokens=3,
            ),
            RequestTimes(arrival_s=0.5, first_token_s=1.5, last_token_s=1.5, num_output_tokens=1),
        ],
        token_gaps_s=[tpot_s, tpot_s],
        counters=counters,
        gauges=gauges,
        output_token_ids=[list(ids) for ids in output_token_ids],
        integrity_checks=integrity_checks,
        expansions=[
            ExpansionAt(step=step, seconds=0.1 * step, expansion=level, tails_far=bool(tails))
            for step, level, *tails in levels
        ],
    )
