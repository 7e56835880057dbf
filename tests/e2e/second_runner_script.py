# SPDX-License-Identifier: Apache-2.0
"""Engines with vLLM's model runner V2 on the CPU backend, in a process of its own.

vLLM's CPU worker uses this runner with a Triton that compiles for CPUs, and V1 without one. V2
needs it only for its own small kernels (block tables, slots, sampling), which Triton's interpreter
can run as well. So vLLM is shown a Triton CPU backend that claims to be active (`CpuDriver`).

The script reads model, prompts, max_tokens and the engines' arguments by name from stdin; an engine
may override all three. With `greedy`, kernels that take long in the interpreter are left out. For
each engine it writes a line to stdout: tokens, manifest and metrics, and the steps of the one that
replays full graphs (`whole_steps.py`). More arguments of an engine:

* `rounds`: how often it gets the prompts; with more than one, the tokens are those of all rounds.
* `far_layers`: the number of far layers.
* `walk`: a seed of a random walk over all levels, with poison in pages that are given back.
* `warm_up`: it warms its kernels up first, as on a GPU.
"""

import itertools
import json
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}

from triton.backends import backends


class CpuDriver:
    """What vLLM's modules ask a driver of Triton for when they are imported."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch="", warp_size=1)

    def get_current_device(self) -> int:
        return 0


def main() -> None:
    backends["cpu"] = SimpleNamespace(driver=CpuDriver)
    import pytest

    from tests.e2e import faults, harness
    from tests.e2e.deferred_ffn import defer_compute
    from tests.e2e.whole_steps import WholeSteps
    from vllm_tiered.adapter.kv import plan, worker

    asked = json.load(sys.stdin)

    def drive(llm: Any) -> list[list[int]]:
        assert llm.llm_engine.vllm_config.use_v2_model_runner
        if warms_up:
            more["warm_up"] = warm_up(patched, llm)
        compute_nothing(llm)
        tokens = [harness.generate(llm, prompts, max_tokens) for _ in range(rounds)]
        if arguments.get("enable_prefix_caching"):
            more["hits"] = harness.metric("prefix_cache_hits")
        if more["walks"]:
            more["level_changes"] = harness.metric("tiered_kv_level_changes")
        return [of_request for of_round in tokens for of_request in of_round]

    on_host = worker.make_translator
    for name, arguments in asked["engines"].items():
        tiered = arguments.pop("tiered")
        model = arguments.pop("model", asked["model"])
        prompts = arguments.pop("prompts", asked["prompts"])
        max_tokens = arguments.pop("max_tokens", asked["max_tokens"])
        rounds = arguments.pop("rounds", 1)
        far_layers, seed = arguments.pop("far_layers", None), arguments.pop("walk", None)
        warms_up = arguments.pop("warm_up", False)
        more: dict[str, Any] = {"walks": seed is not None}
        translator: Any = as_on_a_gpu if name == "swapping" else on_host
        worker.make_translator = translator
        with pytest.MonkeyPatch.context() as patched:
            deferred = defer_compute(patched, haste=0.6) if name == "ffn on a fake" else None
            whole = WholeSteps(patched) if name == "whole steps" else None
            if whole:
                rise_after(patched, num_steps=6)
            if far_layers is not None:
                patched.setattr(plan, "resolve_num_far", lambda kv, num_layers, n=far_layers: n)
            if seed is not None:
                faults.walk(patched, seed, steps_per_level=2)
                faults.poison_freed_pages(patched)
            if asked.get("greedy"):
                be_greedy(patched)
                cache_states(patched)
            found = harness.run(model, [], tiered, drive=drive, **arguments)
        assert deferred is None or deferred.num_deferred > 50
        steps = whole.steps if whole else []
        print(json.dumps({"name": name, "steps": steps, **more, **asdict(found)}), flush=True)


def rise_after(patched: Any, *, num_steps: int) -> None:
    """Set the controller to no far layer for `num_steps`, then to as many as possible."""
    from vllm_tiered.adapter.kv import adaptive
    from vllm_tiered.kv.controller import Decision

    counter = itertools.count()

    def step(signals: Any, state: Any, levels: Any, tuning: Any) -> Any:
        level = 0 if next(counter) < num_steps else len(levels.ladder) - 1
        return Decision(level_idx=level, reason="as far as can be"), state

    patched.setattr(adaptive.controller, "step", step)


def cache_states(patched: Any) -> None:
    """Let vLLM cache recurrent states without what its CPU kernels cannot do.

    They do not return a state from inside a prefill, so vLLM ends a step there instead.
    """
    import dataclasses

    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    own = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
        spec = own(layer, vllm_config)
        return dataclasses.replace(
            spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
        )

    patched.setattr(MambaMixer2, "get_kv_cache_spec", get_kv_cache_spec)


def be_greedy(patched: Any) -> None:
    """Take the largest logits without a kernel, and copy each state in one program.

    The interpreter spends most of a step in these two kernels otherwise.
    """
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.gpu.sample import sampler

    patched.setattr(sampler, "gumbel_sample", lambda logits, *_, **__: logits.argmax(dim=-1))
    patched.setattr(mamba_utils, "_TEMPORAL_TILES", 1)


def warm_up(patched: Any, llm: Any) -> list[bool]:
    """Warm the kernels up, and return whether pages held anything before and after clearing.

    The interpreter lacks what some kernels of the sampler use, so requests are greedy.
    """
    import torch
    from vllm import SamplingParams
    from vllm.v1.worker import gpu_worker

    from vllm_tiered.adapter.kv.connector import TieredConnector

    held: list[bool] = []
    clear = TieredConnector.clear_near_pages

    def clear_near_pages(connector: Any) -> None:
        pages = connector._worker.swapper._near_pages._near.data
        held.append(bool(pages.any()))
        clear(connector)
        held.append(bool(pages.any()))

    patched.setattr(TieredConnector, "clear_near_pages", clear_near_pages)
    patched.setattr(torch.accelerator, "synchronize", lambda: None)
    patched.setattr(
        SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0.0, max_tokens=9)
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    gpu_worker.warmup_kernels(
        worker.model_runner, worker.execute_model, lambda grammar: worker.sample_tokens(None)
    )
    return held


def compute_nothing(llm: Any) -> None:
    """Run a step that only reports an abort, for which V2 has no forward context."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("aborted", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9))
    engine.step()
    engine.abort_request(["aborted"], internal=False)
    engine.engine_core.get_output()


def as_on_a_gpu(pages: Any, names: list[str], block_tokens: int, device: Any) -> Any:
    """Return a translator that translates block tables with the kernel."""
    from vllm_tiered.adapter.kv.device_translation import DeviceTranslator
    from vllm_tiered.kernels.kv_pages import api

    return DeviceTranslator(pages, names, block_tokens, device, api.translate)


if __name__ == "__main__":
    main()
