# SPDX-License-Identifier: Apache-2.0
"""The integer program against brute force, and against the placements that it should beat."""

import ctypes
import itertools
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import scipy.optimize
from hypothesis import example, given, settings

from tests.cost.test_weights import model, opt_layer
from vllm_tiered.cost import near_program
from vllm_tiered.cost.latency import Effort, place_for_latency
from vllm_tiered.cost.near_program import Links, Problem, Stay, solve
from vllm_tiered.cost.pipeline import (
    ALONE,
    Link,
    Slowdown,
    StepTimes,
    step_time,
    transfer_seconds,
    waits_in_step,
)
from vllm_tiered.cost.weights import (
    SLOT_ALIGNMENT,
    Kind,
    Parameter,
    Placement,
    Role,
    Sublayer,
    place,
    slot_bytes,
    slot_of,
    spill,
)
from vllm_tiered.errors import BudgetError

PAGE = SLOT_ALIGNMENT
LINK = Link(bytes_per_s=PAGE * 1e3)  # a page a millisecond
STORAGE = Link(bytes_per_s=PAGE * 300)


def sublayer(layer, kind, *pages):
    return Sublayer(
        layer=layer,
        kind=kind,
        parameters=tuple(
            Parameter(name=f"m{i}.weight", num_bytes=count * PAGE, role=Role.MATRIX)
            for i, count in enumerate(pages)
        ),
    )


def small_model(num_layers, attention, ffn):
    return [
        part
        for layer in range(num_layers)
        for part in (
            sublayer(layer, Kind.ATTENTION, *attention),
            sublayer(layer, Kind.FFN, *ffn),
        )
    ]


def by_kind(sublayers, attention, ffn):
    seconds = {Kind.ATTENTION: attention, Kind.FFN: ffn}
    return StepTimes(compute=tuple(seconds[part.kind] for part in sublayers))


def balance(placement, times, slower=ALONE):
    """The program's objective: each transfer beside the compute before it."""
    transfers = transfer_seconds(placement, LINK, STORAGE)
    total = 0.0
    for position, transfer in enumerate(transfers):
        compute = times.compute[position - 1]
        both = min(compute * slower.compute, transfer * slower.link)
        total += both + max(compute - both / slower.compute, transfer - both / slower.link)
    return total


def every_placement(sublayers, tiers):
    homes = [itertools.product(tiers, repeat=len(part.parameters)) for part in sublayers]
    for chosen in itertools.product(*map(list, homes)):
        far, stored = (
            tuple(
                tuple(p for p, home in zip(part.parameters, of_part, strict=True) if home == tier)
                for part, of_part in zip(sublayers, chosen, strict=True)
            )
            for tier in ("far", "stored")
        )
        yield Placement(policy="brute", sublayers=tuple(sublayers), far=far, stored=stored)


@settings(max_examples=40, deadline=None)
@given(
    attention=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    ffn=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    compute=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    budget=st.integers(4, 40),
    far_budget=st.integers(0, 30),
    has_storage=st.booleans(),
    slower=st.sampled_from([ALONE, Slowdown(1.25, 1.5), Slowdown(2.0, 2.0)]),
)
def test_the_program_finds_what_brute_force_finds(
    attention, ffn, compute, budget, far_budget, has_storage, slower
):
    """Where something of every sublayer is far, its constraints are those of the slots exactly."""
    sublayers = small_model(1 if has_storage else 2, attention, ffn)
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    tiers = ("near", "far", "stored") if has_storage else ("near", "far")
    fitting = [
        balance(placement, times, slower)
        for placement in every_placement(sublayers, tiers)
        if all(far or stored for far, stored in placement.staged)
        and placement.near_bytes <= budget * PAGE
        and placement.far_bytes <= far_budget * PAGE
    ]
    links = Links(LINK, STORAGE if has_storage else None, slower)
    far_bytes = far_budget * PAGE
    problem = Problem(
        sublayers=sublayers, times=times, links=links, far_bytes=far_bytes, stay=Stay.NONE
    )
    solved = solve(problem, budget * PAGE)
    if not fitting:
        assert solved is None
        return
    assert solved is not None and all(far or stored for far, stored in solved.staged)
    assert solved.near_bytes <= budget * PAGE
    assert solved.far_bytes <= far_bytes
    assert balance(solved, times, slower) == pytest.approx(min(fitting), rel=2e-4)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    compute=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    budget=st.integers(4, 40),
    stay=st.sampled_from(Stay),
    ahead=st.integers(1, 3),
)
def test_no_placement_of_its_kind_is_better_than_the_programs(sizes, compute, budget, stay, ahead):
    """By its own sum; longer last rounds may make it exceed the budget, which callers look at."""
    sublayers = small_model(4, sizes[:1], sizes[1:])
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    problem = Problem(
        sublayers=sublayers,
        times=times,
        links=Links(LINK, None),
        far_bytes=None,
        stay=stay,
        ahead=ahead,
    )
    solved = solve(problem, budget * PAGE)
    near_attention = [not far for far in (solved.far if solved else ())][::2]
    near_ffn = [not far for far in (solved.far if solved else ())][1::2]
    if stay is Stay.NONE:
        assert not any(near_attention + near_ffn)
    if stay is Stay.LAYERS:
        assert near_attention == near_ffn
    fitting = [
        balance(placement, times)
        for each in every_placement(sublayers, ("near", "far"))
        if (placement := replace(each, ahead=ahead)).near_bytes <= budget * PAGE
        and is_of(placement, stay)
    ]
    if fitting and (stay is Stay.NONE or ahead == 1):  # else the slots are not known beforehand
        assert solved is not None
        assert balance(solved, times) <= min(fitting) * (1 + 2e-4) + 1e-9


def is_of(placement, stay):
    """Of those that the program has; with any it takes slots to hold either kind."""
    stays = [not far for far in placement.far]
    if stay is Stay.NONE:
        return not any(stays)
    if stay is Stay.LAYERS:
        is_whole = stays[::2] == stays[1::2]
        return is_whole and len(placement.extents) % 2 == 0
    sizes = slot_bytes(placement.extents, placement.ahead)
    return len(set(sizes)) == 1 and len(sizes) == placement.ahead + 1


@settings(max_examples=25, deadline=None)
@given(
    num_layers=st.integers(2, 6),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    compute=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    budget=st.integers(2, 160),
)
def test_never_slower_than_the_others_and_within_the_budget(num_layers, sizes, compute, budget):
    sublayers = small_model(num_layers, sizes[:2], sizes[2:])
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    others = [place("all_far", sublayers), place("helm", sublayers)]
    others += [place("flexgen", sublayers, [near, 100 - near, 0]) for near in (20, 50)]
    fitting = [other for other in others[:2] if other.near_bytes <= budget * PAGE]
    try:
        chosen = place_for_latency(sublayers, times, LINK, budget * PAGE)
    except BudgetError:
        assert not fitting
        return
    assert chosen.near_bytes <= budget * PAGE
    for other in fitting:
        assert seconds(chosen, times) <= seconds(other, times) * (1 + 1e-9)


def seconds(placement, times):
    return step_time(
        transfer_seconds(placement, LINK, STORAGE), times, ahead=placement.ahead
    ).seconds


def test_everything_near_where_it_fits():
    sublayers = model(opt_layer())
    total = sum(part.num_bytes for part in sublayers)
    chosen = place_for_latency(sublayers, by_kind(sublayers, 1e-3, 2e-3), LINK, total)
    assert chosen.far_bytes == 0 and chosen.policy == "latency"


def test_balance_is_what_the_paper_found_and_goes_further():
    """OPT decoding from Optane: table IV's ratios, baseline against HeLM (27 % less), and ours."""
    sublayers = model(opt_layer(), num_layers=24)
    flexgen = place("flexgen", sublayers, [20, 80, 0])
    attention, ffn = transfer_seconds(flexgen, LINK)[:2]
    times = by_kind(sublayers, 0.36 * ffn, 1.85 * attention)
    baseline = seconds(flexgen, times)
    helm = place("helm", sublayers)
    assert 1 - seconds(helm, times) / baseline == pytest.approx(0.27, abs=0.04)
    chosen = place_for_latency(sublayers, times, LINK, helm.near_bytes)
    # With its memory no other near set is faster one ahead; two or three ahead the link is busy
    # while the FFN computes, too.
    assert chosen.ahead > 1
    assert seconds(chosen, times) < 0.93 * seconds(helm, times)
    with_less = place_for_latency(sublayers, times, LINK, flexgen.near_bytes)
    assert seconds(with_less, times) < 0.9 * baseline


@pytest.mark.parametrize("percent", [82, 84, 96])
def test_near_memory_is_used_where_a_third_slot_does_not_fit(percent):
    """The last of an odd number of far sublayers has one, which the program does not know."""
    sublayers = model(opt_layer(256), num_layers=4)
    near_bytes = sum(part.num_bytes for part in sublayers) * percent // 100
    chosen = place_for_latency(
        sublayers,
        by_kind(sublayers, 1.3e-4, 0.7e-4),
        Link(bytes_per_s=16e9),
        near_bytes,
        slowdown=Slowdown(1.35, 1.0),
    )
    assert 0.95 * near_bytes < chosen.near_bytes <= near_bytes


def test_far_memory_bounds_the_choice_where_another_fits():
    sublayers = small_model(4, (3, 2), (16, 8))
    times = by_kind(sublayers, 30e-3, 30e-3)  # all far would be hidden: nothing is lost by it
    near = place("helm", sublayers).near_bytes
    helm_far = place("helm", sublayers).far_bytes
    chosen = place_for_latency(sublayers, times, LINK, near, helm_far)
    assert chosen.far_bytes <= helm_far


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    compute=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    near=st.integers(20, 100),
    far=st.integers(0, 100),
)
def test_storage_takes_what_far_memory_does_not(sizes, compute, near, far):
    sublayers = small_model(4, sizes[:2], sizes[2:])
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    others = [spill(place(name, sublayers), far * PAGE) for name in ("all_far", "helm")]
    fitting = [other for other in others if other.near_bytes <= near * PAGE]
    try:
        chosen = place_for_latency(sublayers, times, LINK, near * PAGE, far * PAGE, STORAGE)
    except BudgetError:
        assert not fitting
        return
    assert chosen.near_bytes <= near * PAGE and chosen.far_bytes <= far * PAGE
    for other in fitting:
        assert seconds(chosen, times) <= seconds(other, times) * (1 + 1e-9)


def test_too_little_memory_is_said_with_the_least():
    sublayers = small_model(4, (3, 2), (16, 8))
    with pytest.raises(BudgetError, match=r"no placement fits .* the least takes .*near_gib"):
        place_for_latency(sublayers, by_kind(sublayers, 1e-3, 1e-3), LINK, 10 * PAGE)


def test_a_large_model_is_placed_in_no_time():
    sublayers = model(opt_layer(2048), num_layers=96)
    times = by_kind(sublayers, 1e-3, 2e-3)
    link = Link(bytes_per_s=20e9, latency_s=1e-5)
    chosen = place_for_latency(sublayers, times, link, 3 << 30)
    assert chosen.near_bytes <= 3 << 30


def test_the_solver_prints_nothing(monkeypatch, capfd):
    """HiGHS prints a line now and then: not into what a command prints. Others' lines are kept."""
    libc = ctypes.CDLL(None)
    solver = scipy.optimize.milp
    calls: list[object] = []

    def noisy(*args, **kwargs):
        libc.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        if not calls:
            libc.puts(b"another thread's")
        calls.append(args)
        return solver(*args, **kwargs)

    monkeypatch.setattr(near_program, "milp", noisy)
    sublayers = small_model(4, (3, 2), (16, 8))
    place_for_latency(sublayers, by_kind(sublayers, 1e-3, 1e-3), LINK, 90 * PAGE)
    assert calls
    libc.puts(b"after")
    libc.fflush(None)
    assert capfd.readouterr() == ("another thread's\nafter\n", "")


def test_whole_layers_stay_near_where_that_saves_a_large_slot():
    """The FFN keeps a slot of its own, smaller size: more of attention fits near."""
    sublayers = small_model(12, (6,), (1,))
    times = by_kind(sublayers, 1e-3, 1e-3)
    near = 68 * PAGE
    by_any = Effort(depths=(1,), stays=(Stay.NONE, Stay.ANY), gap=1e-4)
    other = place_for_latency(sublayers, times, LINK, near, effort=by_any)
    chosen = place_for_latency(
        sublayers, times, LINK, near, effort=by_any._replace(stays=tuple(Stay))
    )
    assert other.near_bytes <= near and chosen.near_bytes <= near
    assert [size // PAGE for size in slot_bytes(chosen.extents)] == [6, 1]
    assert seconds(chosen, times) < 0.8 * seconds(other, times)


# The pipeline ---------------------------------------------------------------------------


def times_of(*compute, rest=0.0):
    return StepTimes(compute=compute, rest=rest)


def test_transfers_hide_behind_the_sublayer_before():
    result = step_time([1.0, 2.0, 1.0, 2.0], times_of(3.0, 3.0, 3.0, 3.0))
    assert result == (12.0, 6.0, 0.0)


def test_what_does_not_hide_is_stall():
    """Each transfer of 2 beside a compute of 1: the link is never idle."""
    result = step_time([2.0] * 4, times_of(1.0, 1.0, 1.0, 1.0))
    assert result.seconds == pytest.approx(8.0)
    assert result.stall_seconds == pytest.approx(4.0)


def test_the_unbalanced_pipeline_of_the_paper():
    """Figure 8: attention is short beside the FFN's transfer, the FFN long beside attention's."""
    result = step_time([1.0, 5.0] * 3, times_of(*(2.0, 3.0) * 3))
    assert result.seconds == pytest.approx(3 * (5.0 + 3.0))


def test_the_rest_of_a_step_hides_the_first_transfer():
    without = step_time([3.0, 0.0] * 4, times_of(*[1] * 8))
    with_rest = step_time([3.0, 0.0] * 4, times_of(*[1] * 8, rest=1.0))
    assert without.seconds == with_rest.seconds == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("transfers", "ahead"),
    [
        ([0.0] * 4, 1),
        ([5.0, 0.0, 0.0, 0.0], 1),
        ([5.0, 0.0, 5.0, 0.0], 1),
        ([5.0, 5.0, 5.0, 0.0], 1),  # the last of an odd number has a third slot
        ([5.0] * 4, 3),
    ],
)
def test_what_has_a_slot_for_itself_is_not_moved_again(transfers, ahead):
    assert step_time(transfers, times_of(1, 1, 1, 1), ahead=ahead) == (4.0, 0.0, 0.0)


def test_two_ahead_what_is_unbalanced_hides_too():
    """HeLM's placement on Optane: the FFN's transfer is too long for attention, attention's leaves
    the link idle while the FFN computes. In sum compute is longer."""
    transfers, times = [1.4, 1.4] * 8, times_of(*[1.0, 2.0] * 8)
    assert step_time(transfers, times).seconds == pytest.approx(8 * (1.4 + 2.0))
    result = step_time(transfers, times, ahead=2)
    assert result.seconds == pytest.approx(24.0) and result.stall_seconds == 0.0


def test_more_slots_do_not_help_a_link_that_is_never_idle():
    transfers, times = [3.0, 3.0] * 6, times_of(*[1.0, 2.0] * 6)
    for ahead in (1, 2, 3):
        assert step_time(transfers, times, ahead=ahead).seconds == pytest.approx(36.0)


@example(transfers=[9] * 8, compute=[9] * 7 + [8] + [0] * 8, ahead=3)  # falls behind by a little
@example(transfers=[3] * 10, compute=[1] * 16, ahead=3)  # a longer round: some are not moved again
@settings(max_examples=60, deadline=None)
@given(
    transfers=st.lists(st.integers(0, 9), min_size=6, max_size=16),
    compute=st.lists(st.integers(0, 9), min_size=16, max_size=16),
    ahead=st.integers(1, 4),
)
def test_a_step_is_as_long_as_the_rings_events_say(transfers, compute, ahead):
    """Another way to compute it: what is in each slot, and when it came, over many steps."""
    compute = compute[: len(transfers)]
    far = [seconds for seconds in transfers if seconds]
    slots = [slot_of(position, len(far), ahead) for position in range(len(far))]
    resident: dict[int, int] = {}
    arrived: dict[int, float] = {}
    now = link = 0.0
    ends = []
    for _ in range(200):
        index = 0
        for seconds, transfer in zip(compute, transfers, strict=True):
            if transfer:
                now = max(now, arrived.get(slots[index], 0.0))
                resident[slots[index]] = index
                for further in range(1, ahead + 1):
                    following = (index + further) % len(far)
                    slot = slots[following]
                    if slot != slots[index] and resident.get(slot) != following:
                        link = max(link, now) + far[following]
                        resident[slot], arrived[slot] = following, link
                index += 1
            now += seconds
        ends.append(now)
    steady = (ends[-1] - ends[-101]) / 100
    step = step_time(transfers, times_of(*compute), ahead=ahead)
    assert step.seconds == pytest.approx(steady, rel=0.01)
    waits = waits_in_step(transfers, times_of(*compute), ahead=ahead)
    assert sum(waits) == pytest.approx(step.stall_seconds)
    assert step.stall_seconds == pytest.approx(steady - sum(compute), rel=0.01, abs=0.2)
