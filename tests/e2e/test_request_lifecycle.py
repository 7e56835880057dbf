# SPDX-License-Identifier: Apache-2.0
"""Life cycle of requests' blocks: prefix reuse, aborts, preemption; all in float32."""

import pytest

from tests.e2e.harness import Tokens, engine, generate, metric, random_prompts, run, vllm_tokens

NEAR = 96 << 20
"""Memory too small, without the plugin, for about 16 requests of this file's lengths."""


def turns(llm) -> Tokens:
    """Run three turns for each of six users, whose prompts share a beginning."""
    shared = random_prompts(1, seed=7, longest=5)[0] * 20
    history = [shared + prompt for prompt in random_prompts(6, seed=8)]
    answers: Tokens = []
    for turn in range(3):
        turn_answers = generate(llm, history, 24)
        answers += turn_answers
        questions = random_prompts(6, seed=100 + turn, longest=20)
        history = [
            past + answer + question
            for past, answer, question in zip(history, turn_answers, questions, strict=True)
        ]
    return answers


@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
def test_conversation_reuses_its_prefix(policy) -> None:
    cached: list[float] = []

    def drive(llm) -> Tokens:
        answers = turns(llm)
        cached.append(metric("prefix_cache_hits"))
        return answers

    alone = run("deep", [], drive=drive, enable_prefix_caching=True)
    tiered = run(
        "deep",
        [],
        {"expansion": 2.0, "policy": policy},
        drive=drive,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=NEAR,
    )
    assert tiered.tokens == alone.tokens
    assert cached[0] > 0 and cached[1] >= 0.9 * cached[0]
    assert tiered.metrics["tiered_kv_read_bytes"] > 0


def test_prefix_computed_and_hit_in_one_step() -> None:
    """Equal prompts are scheduled together: the second hits blocks that the first computes."""
    prompt = random_prompts(1, seed=3, longest=5)[0] * 40
    prompts = [prompt, [*prompt, 5], [*prompt, 6], prompt]
    tiered = run(
        "deep",
        prompts,
        {"expansion": 2.0},
        enable_prefix_caching=True,
        kv_cache_memory_bytes=NEAR,
    )
    assert tiered.tokens == vllm_tokens("deep", prompts)


def test_prefix_cache_under_preemption() -> None:
    prompts = random_prompts(12, seed=4)
    tiered = run(
        "deep",
        prompts,
        {"expansion": 1.5},
        enable_prefix_caching=True,
        max_tokens=100,
        kv_cache_memory_bytes=48 << 20,
        max_model_len=256,
    )
    assert tiered.metrics["num_preemptions"] > 0
    assert tiered.tokens == vllm_tokens("deep", prompts, max_tokens=100)


def test_abort_in_the_middle() -> None:
    """Aborted requests free blocks and partial blocks; the others' tokens do not change."""
    from vllm import SamplingParams

    prompts = random_prompts(10, seed=5)
    expected = vllm_tokens("deep", prompts)  # first, as a process holds one engine at a time
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with engine("deep", {"expansion": 2.0}, kv_cache_memory_bytes=NEAR) as llm:
        core = llm.llm_engine
        for number, prompt in enumerate(prompts):
            core.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        finished: dict[int, list[int]] = {}
        steps = 0
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    finished[int(output.request_id)] = list(output.outputs[0].token_ids)
            steps += 1
            if steps in (3, 11, 20):
                core.abort_request([str(steps % 10), str(steps % 10 + 4)])
        survivors = [n for n in range(10) if n not in (3, 7, 1, 5, 0, 4)]
        assert {n: finished[n] for n in survivors} == {n: expected[n] for n in survivors}
        generate(llm, prompts[:2], 4)  # runs the step that frees the last blocks
        assert metric("tiered_kv_blocks_reserved") == 0
        assert llm.reset_prefix_cache()


def test_all_blocks_return_when_idle() -> None:
    """Partial blocks of many short requests take blocks from the pool, and return them."""
    prompts = random_prompts(16, seed=6, longest=12)
    with engine(
        "deep", {"expansion": 3.0}, kv_cache_memory_bytes=40 << 20, max_model_len=128
    ) as llm:
        num_reserved: list[float] = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        for prompt in prompts:
            generate_async(llm, prompt)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            elastic = scheduler.connector._scheduler.elastic
            elastic.check_integrity()
            num_reserved.append(len(elastic.reserved))
        assert max(num_reserved) > 0
        assert num_reserved[-1] == 0
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == (
            llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
        )


def generate_async(llm, prompt: list[int]) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    llm.llm_engine.add_request(str(id(prompt)), {"prompt_token_ids": prompt}, sampling)


def test_prefix_cache_reset_under_load() -> None:
    """Reserved blocks do not count as used; running requests start over and end the same."""
    from vllm import SamplingParams

    prompts = random_prompts(8, seed=9)
    expected = vllm_tokens("deep", prompts)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with engine(
        "deep",
        {"expansion": 3.0},
        enable_prefix_caching=True,
        kv_cache_memory_bytes=48 << 20,
        max_model_len=256,
        async_scheduling=False,
    ) as llm:
        core = llm.llm_engine
        scheduler = core.engine_core.engine_core.scheduler
        for number, prompt in enumerate(prompts):
            core.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        finished: dict[int, list[int]] = {}
        steps = 0
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    finished[int(output.request_id)] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == 12:
                assert scheduler.connector._scheduler.elastic.reserved
                assert not scheduler.reset_prefix_cache()
                scheduler.connector._scheduler.elastic.check_integrity()
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
                assert not scheduler.connector._scheduler.elastic.reserved
        assert [finished[number] for number in range(8)] == expected
