# SPDX-License-Identifier: Apache-2.0
"""A page that comes back damaged costs a recompute, never a wrong token."""

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import flipping_device, stuck_device, walk
from tests.e2e.harness import Tokens, engine, generate, metric, random_prompts, run, vllm_tokens
from vllm_tiered.adapter.kv import scheduler, worker
from vllm_tiered.errors import BudgetError, IntegrityError
from vllm_tiered.kv.recompute import RecentSteps
from vllm_tiered.kv.tuning import STORAGE_TUNING

MIB = 1 << 20
PROMPTS = random_prompts(8, longest=100)
TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 48 * MIB, "max_model_len": 256}


@pytest.mark.parametrize("caching", [False, True])
def test_a_flipped_bit_in_far_memory(monkeypatch, caching) -> None:
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device({300}))
    with engine(
        "deep", {"expansion": 2.0, "verify": "full"}, enable_prefix_caching=caching, **TIGHT
    ) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_lost_blocks") >= 1
        assert metric("tiered_kv_recomputed_requests") == 1  # exactly the request that was hit
        again = generate(llm, PROMPTS)
    assert tokens == again == vllm_tokens("deep", PROMPTS)


def test_unverified_damage_changes_tokens(monkeypatch) -> None:
    """The test above depends on this: attention reads the damaged bytes."""
    reads = set(range(100, 9999, 10))
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device(reads, whole_pages=True))
    result = run("deep", PROMPTS, {"expansion": 2.0}, **TIGHT)
    assert result.tokens != vllm_tokens("deep", PROMPTS)


def test_many_flipped_bits(monkeypatch) -> None:
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device(set(range(50, 4000, 120))))
    with engine("deep", {"expansion": 2.0, "verify": "full"}, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_recomputed_requests") >= 3
    assert tokens == vllm_tokens("deep", PROMPTS)


@pytest.mark.parametrize("policy", ["interleave", "blocks"])
def test_a_bad_place_in_far_memory_costs_one_recompute(monkeypatch, policy) -> None:
    """It is not used again, so that the requests which get its block next do not lose it too."""
    monkeypatch.setattr(worker, "make_device", stuck_device)
    config = {"expansion": 3.0, "verify": "full", "policy": policy}
    with engine("deep", config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB}) as llm:
        tokens = generate(llm, PROMPTS)
        again = generate(llm, PROMPTS)
        assert metric("tiered_kv_page_errors_checksum") == 1
        assert metric("tiered_kv_recomputed_requests") == 1
    assert tokens == again == vllm_tokens("deep", PROMPTS)


def test_nothing_is_hit_that_may_come_from_a_page_that_is_looked_at_now_and_then() -> None:
    recent = RecentSteps(32, 10, notices_late=True)
    assert recent.written_blocks() == set(range(1, 10))
    assert RecentSteps(32, 10, notices_late=False).written_blocks() == set()


def second_turns(monkeypatch) -> tuple[Tokens, Tokens]:
    """Return answers to a prompt that continues a damaged first turn; and vLLM's.

    The second chunk of the first prompt reads the blocks of the first chunk, one of them damaged,
    and fills two blocks, which are then in the prefix cache twice.
    """
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device({1}, whole_pages=True))
    prompts = [[token for prompt in random_prompts(12, seed=3) for token in prompt][:200]]
    expected = vllm_tokens("deep", prompts, max_tokens=8)
    longer = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    with engine(
        "deep",
        {"expansion": 2.0, "verify": "full"},
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        **TIGHT,
    ) as llm:
        assert generate(llm, prompts, 8) == expected
        assert metric("tiered_kv_recomputed_requests") == 1
        again = generate(llm, longer, 8)
    return again, vllm_tokens("deep", longer, max_tokens=8)


def test_blocks_computed_from_a_lost_page_are_not_hit(monkeypatch) -> None:
    again, expected = second_turns(monkeypatch)
    assert again == expected


def test_the_test_above_fails_if_such_blocks_stay(monkeypatch) -> None:
    monkeypatch.setattr(RecentSteps, "written_blocks", lambda self: set())
    again, expected = second_turns(monkeypatch)
    assert again != expected


@pytest.mark.parametrize(("far_gib", "expansion"), [(0, 2.0), (0.03, 3.0), (0, "auto")])
def test_far_pages_in_a_file(tmp_path: Path, far_gib, expansion, monkeypatch) -> None:
    """Cases: no far memory; some layers in memory and the others in the file; growth into it."""
    # It measures 256 steps without far layers by default; these requests end before.
    soon = dataclasses.replace(STORAGE_TUNING, base_records=1, record_steps=8)
    monkeypatch.setattr(scheduler, "STORAGE_TUNING", soon)
    config = {
        "tier": "storage",
        "path": str(tmp_path),
        "far_gib": far_gib,
        "expansion": expansion,
    }
    result = run("deep", PROMPTS, config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB})
    assert result.metrics["tiered_kv_read_bytes"] > 0
    stated = result.manifest["kv"]
    assert stated["storage_bytes"] > 0 and (stated["far_bytes"] > 0) == (far_gib > 0)
    for home in ("far_bytes", "storage_bytes"):
        assert result.metrics[f"tiered_kv_{home}"] == stated[home]
    assert result.tokens == vllm_tokens("deep", PROMPTS)
    assert os.listdir(tmp_path) == []


def test_an_unneeded_file_is_reported(tmp_path: Path, caplog_vllm) -> None:
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 1.0, "expansion": 2.0}
    result = run("deep", PROMPTS[:2], config, max_tokens=2, **TIGHT)
    assert result.manifest["kv"]["storage_bytes"] == 0 < result.manifest["kv"]["far_bytes"]
    assert "far memory (kv.far_gib holds all far pages: no file in kv.path)" in caplog_vllm.text


@pytest.mark.parametrize("seed", [1, 2])
def test_flipped_bits_while_the_level_changes(monkeypatch, seed) -> None:
    """Pages are lost too while their layers move to the far tier or back."""
    walk(monkeypatch, seed=seed, steps_per_level=2)
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device(set(range(20, 4000, 250))))
    with engine("deep", {"verify": "full"}, enable_prefix_caching=True, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_recomputed_requests") >= 2
    assert tokens == vllm_tokens("deep", PROMPTS)


def eio(moved: int) -> int:
    raise OSError(5, "Input/output error")


def enospc(moved: int) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("levels", ["fixed", "changing"])
@pytest.mark.parametrize(
    ("name", "outcome", "kind"),
    [
        ("preadv", eio, "io"),
        ("preadv", lambda moved: 0, "short"),  # the file ends here
        ("pwritev", eio, "write"),
        ("pwritev", enospc, "write"),
    ],
    ids=["read error", "truncated", "write error", "full"],
)
def test_a_disk_that_fails_now_and_then(
    monkeypatch, tmp_path: Path, name, outcome, kind, levels
) -> None:
    original = getattr(os, name)
    # Several calls in a row fail, as pages that were read together are retried one by one. They
    # fail rarely enough not to stop the engine.
    calls = iter(range(1 << 30))

    def call(*args: Any) -> int:
        moved: int = original(*args)
        return outcome(moved) if 50 <= next(calls) % 600 < 60 else moved

    monkeypatch.setattr(os, name, call)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 2.0}
    if levels == "changing":
        walk(monkeypatch, seed=3)
        config["expansion"] = "auto"
    with engine("deep", config, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_recomputed_requests") >= 1
        assert metric(f"tiered_kv_page_errors_{kind}") >= 1
    assert tokens == vllm_tokens("deep", PROMPTS)


@pytest.mark.slow
def test_a_disk_that_is_silent(monkeypatch, tmp_path: Path) -> None:
    """Requests that wait for it are recomputed after 10 s, and later ones use it again."""
    original = os.preadv
    calls = iter(range(1 << 30))
    answers, was_waited_for = threading.Event(), threading.Event()

    def preadv(*args: Any) -> int:
        if next(calls) == 300:
            answers.wait(timeout=240)
            was_waited_for.set()
        return original(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 2.0}
    with engine("deep", config, **TIGHT) as llm:
        begin = time.monotonic()
        try:
            tokens = generate(llm, PROMPTS)
            assert time.monotonic() - begin > 10 and not was_waited_for.is_set()
        finally:
            answers.set()
        assert metric("tiered_kv_page_errors_late") >= 1
        again = generate(llm, PROMPTS)
    assert tokens == again == vllm_tokens("deep", PROMPTS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_of_the_model_is_raised_unchanged(monkeypatch, error) -> None:
    """vLLM still ends the step, and the next step must not use its incomplete state."""
    layer_done = worker.TieredWorker.layer_done
    calls = iter(range(1 << 30))

    def fail(self: Any, layer_name: str) -> None:
        if next(calls) == 200:
            raise error
        layer_done(self, layer_name)

    monkeypatch.setattr(worker.TieredWorker, "layer_done", fail)
    with engine("deep", {"expansion": 2.0}, **TIGHT) as llm:
        with pytest.raises(error):
            generate(llm, PROMPTS)
        with pytest.raises(IntegrityError, match="not computed to its end"):
            generate(llm, PROMPTS[:1])


def test_a_page_that_is_never_kept_costs_one_recompute(monkeypatch, tmp_path: Path) -> None:
    """Its slot is replaced, so that the requests which get its block next do not lose it too."""
    pwritev = os.pwritev
    bad: list[int] = []

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        if not bad:
            bad.append(offset)
        if offset <= bad[0] < offset + sum(map(len, buffers)):
            raise OSError(5, "Input/output error")
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 3.0}
    with engine("deep", config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB}) as llm:
        tokens = generate(llm, PROMPTS)
        again = generate(llm, PROMPTS)
        assert metric("tiered_kv_page_errors_write") == 1
        assert metric("tiered_kv_storage_failed") == 0
    assert tokens == again == vllm_tokens("deep", PROMPTS)


@pytest.mark.parametrize("policy", ["interleave", "blocks"])
@pytest.mark.parametrize("expansion", [3.0, "auto"])
@pytest.mark.parametrize(("name", "error"), [("preadv", 5), ("pwritev", 28)], ids=["bad", "full"])
def test_a_disk_that_never_works_is_given_up(
    monkeypatch, tmp_path: Path, caplog_vllm, name, error, expansion, policy
) -> None:
    """The requests are served from memory."""
    soon = dataclasses.replace(STORAGE_TUNING, base_records=1, record_steps=8)
    monkeypatch.setattr(scheduler, "STORAGE_TUNING", soon)
    if (policy, expansion) == ("blocks", "auto"):
        # Its levels are 4 % apart: these requests end before the controller makes a block far.
        walk(monkeypatch, seed=3)

    def fail(*args: Any) -> int:
        raise OSError(error, os.strerror(error))

    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": expansion}
    config["policy"] = policy
    with engine("deep", config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB}) as llm:
        monkeypatch.setattr(os, name, fail)
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_storage_failed") == 1
        assert metric("tiered_kv_far_layers") == 0
        written = metric("tiered_kv_write_bytes")
        again = generate(llm, PROMPTS)
        assert metric("tiered_kv_write_bytes") == written
    assert tokens == again == vllm_tokens("deep", PROMPTS)
    assert caplog_vllm.text.count("it is not used any more. Near and far memory hold") == 1
    assert os.strerror(error) in caplog_vllm.text


@pytest.mark.parametrize("policy", ["interleave", "blocks"])
def test_without_storage_the_layers_in_memory_stay_far(monkeypatch, tmp_path: Path, policy) -> None:
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0.03, "expansion": 3.0}
    config["policy"] = policy

    def fail(*args: Any) -> int:
        raise OSError(28, os.strerror(28))

    with engine("deep", config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB}) as llm:
        monkeypatch.setattr(os, "pwritev", fail)
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_storage_failed") == 1
        assert metric("tiered_kv_far_layers") > 0
        read = metric("tiered_kv_read_bytes")
        again = generate(llm, PROMPTS)
        assert metric("tiered_kv_read_bytes") > read
    assert tokens == again == vllm_tokens("deep", PROMPTS)


def complete(llm: Any, prompts: Tokens, max_tokens: int) -> list[Any]:
    """Return the outputs of greedy requests, with their finish reasons."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(requests, sampling, use_tqdm=False)]


def test_only_a_request_that_memory_cannot_hold_fails(
    monkeypatch, tmp_path: Path, caplog_vllm
) -> None:
    """The longest request needs the far layers; the others are served."""
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 3.0}
    longest = [token for prompt in random_prompts(12, seed=3) for token in prompt][:230]
    prompts = [*PROMPTS[:3], longest, *PROMPTS[3:]]

    def fail(*args: Any) -> int:
        raise OSError(28, os.strerror(28))

    with engine("deep", config, **TIGHT | {"kv_cache_memory_bytes": 11 * MIB}) as llm:
        monkeypatch.setattr(os, "pwritev", fail)
        outputs = complete(llm, prompts, 8)
        assert metric("tiered_kv_storage_failed") == 1
        # What memory holds to the last token is served, also while another one takes the blocks.
        exact = complete(llm, [longest[:192], longest[-192:]], 1)
    assert f"{len(longest)} tokens, and without the storage tier" in caplog_vllm.text
    assert "can have 192" in caplog_vllm.text
    assert [output.finish_reason for output in exact] == ["length"] * 2
    assert [output.finish_reason for output in outputs] == [
        *["length"] * 3,
        "error",
        *["length"] * 5,
    ]
    tokens = [list(output.token_ids) for output in outputs]
    assert tokens[:3] + tokens[4:] == vllm_tokens("deep", PROMPTS, max_tokens=8)


def test_a_request_that_loses_pages_for_ever_fails_alone(monkeypatch, tmp_path: Path) -> None:
    """Without another order of layers the storage tier cannot be given up."""
    config = {
        "tier": "storage",
        "path": str(tmp_path),
        "far_gib": 0,
        "expansion": 3.0,
        "policy": "on_demand",
    }

    def fail(*args: Any) -> int:
        raise OSError(28, os.strerror(28))

    short = random_prompts(2, longest=12, seed=5)
    with engine("deep", config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB}) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            outputs = complete(llm, PROMPTS, 64)
        assert "error" in {output.finish_reason for output in outputs}
        # One partial block each, which stays near.
        again = generate(llm, short, 4)
    assert again == vllm_tokens("deep", short, max_tokens=4)


def test_a_full_disk_is_refused_at_start(monkeypatch, tmp_path: Path) -> None:
    def posix_fallocate(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 2.0}
    with pytest.raises(BudgetError, match=r"kv\.path"), engine("deep", config, **TIGHT):
        pass
