# SPDX-License-Identifier: Apache-2.0
"""Timed steps of a small model in a real engine, for `vllm-tiered probe`.

A probe measures GEMMs, and this module everything else that a step takes: vLLM's scheduling, its
attention, norms and sampling, and the calls between them. The model has random weights, and layers
large enough to push each other out of the caches. So the costs are an engine's, and of no model
that a plan is compared with. A second model, with a KV head for each query head, tells attention's
time for bytes of the KV cache from that for arithmetic.

It runs in a process of its own, as vLLM binds the threads of the process that it computes in:

    python -m vllm_tiered.adapter.step_probe DTYPE

prints a line of JSON with the costs, or why there are none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.probe.step_costs import (
    ContextSteps,
    SmallModel,
    TimedStep,
    median_step,
    step_costs,
)

PREFIX = "VLLM_TIERED_STEPS "
"""Begin of the line with the answer, since vLLM logs to the same stream."""

_LAYERS, _HEADS, _HEAD_SIZE, _INNER = 4, 12, 64, 3072
_HIDDEN = _HEADS * _HEAD_SIZE
_SHARED_KV_HEADS = 3  # four query heads each
_SHORT, _LONG, _PROMPT, _REQUESTS = 16, 192, 256, 16
_OUTPUT_TOKENS = 14
_SKIPPED = 3
"""First decode steps of each batch, in which caches are cold and requests still join."""

_SECONDS = 600


def ask_engine(dtype: str, threads: int) -> dict[str, float]:
    """Return the costs of an engine's steps, from a process that starts one.

    Args:
        dtype: data type of weights and activations.
        threads: number of compute threads.

    Raises:
        UnsupportedError: the engine does not run; the message says why.
    """
    command = [sys.executable, "-m", "vllm_tiered.adapter.step_probe", dtype]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_PLUGINS": "",  # what would serve a model does not matter here
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the steps are timed where they run
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(f"a small engine has not ended in {_SECONDS} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UnsupportedError(f"a small engine does not run: {last[:300]}")
    answer: dict[str, Any] = json.loads(lines[-1].removeprefix(PREFIX))
    if "error" in answer:
        raise UnsupportedError(f"a small engine does not run: {answer['error']}")
    return answer


def main(arguments: Sequence[str]) -> int:
    """Start an engine, time its steps, and print the costs, or why it does not run."""
    (dtype,) = arguments
    answer: dict[str, Any]
    try:
        answer = measure(dtype)
    except Exception as error:  # whatever vLLM raises, the probe is to say it
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    print(f"{PREFIX}{json.dumps(answer)}", flush=True)
    return 0


def measure(dtype: str) -> dict[str, float]:
    """Return the costs of the steps of two engines in this process, one after the other."""
    engine = _Engine(dtype, _SHARED_KV_HEADS)
    one = engine.decode(1, _SHORT)
    shared = engine.context_steps()
    prompts = [engine.batch(1, _PROMPT)[0] for _ in range(3)]
    single = _Engine(dtype, _HEADS).context_steps()
    return step_costs(one, shared, single, median_step(prompts)).to_json()


class _Engine:
    """Engine with a small model of random weights, and a clock in its layers.

    Attributes:
        model: sizes of the model.
    """

    def __init__(self, dtype: str, kv_heads: int) -> None:
        width = 4 if dtype == "float32" else 2
        self.model = SmallModel(
            num_layers=_LAYERS,
            # In and out of qkv, out, gate and up, down.
            features=(_HIDDEN + (_HEADS + 2 * kv_heads) * _HEAD_SIZE)
            + 2 * _HIDDEN
            + (_HIDDEN + 2 * _INNER)
            + (_INNER + _HIDDEN),
            pair_operations=4 * _HEADS * _HEAD_SIZE,
            token_kv_bytes=2 * kv_heads * _HEAD_SIZE * width,
        )
        with tempfile.TemporaryDirectory() as folder:
            config = json.dumps(_config(kv_heads))
            (Path(folder) / "config.json").write_text(config, encoding="utf-8")
            self._llm = _start(folder, dtype, _LAYERS * self.model.token_kv_bytes)
        self._clock = _Clock()
        self._llm.apply_model(self._clock.watch)
        self.batch(1, _SHORT)  # warms up

    def batch(self, requests: int, context: int) -> list[TimedStep]:
        """Run requests of equal length together, and return their steps."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0.0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
        for index in range(requests):
            tokens = [5 + (31 * index + at) % 4000 for at in range(context)]
            name = f"{requests}-{context}-{index}-{time.monotonic_ns()}"
            engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        steps: list[TimedStep] = []
        while engine.has_unfinished_requests():
            rows, seconds = self._clock.timed(engine.step)
            is_prompt = not steps
            steps.append(
                TimedStep(
                    requests=requests,
                    new_tokens=rows // requests if is_prompt else 1,
                    context_tokens=0 if is_prompt else context + len(steps) - 1,
                    **seconds,
                )
            )
        return steps

    def decode(self, requests: int, context: int) -> TimedStep:
        """Return the median decode step of so many requests."""
        found = median_step(self.batch(requests, context)[1 + _SKIPPED :])
        assert found.requests == requests
        return found

    def context_steps(self) -> ContextSteps:
        """Return decode steps of many requests with short and long context."""
        short, long = (self.decode(_REQUESTS, context) for context in (_SHORT, _LONG))
        return ContextSteps(model=self.model, short=short, long=long)


def _config(kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": _LAYERS,
        "intermediate_size": _INNER,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _start(folder: str, dtype: str, token_kv_bytes: int) -> Any:
    from vllm import LLM

    block_tokens = 32
    tokens = (_REQUESTS + 1) * (_LONG + _OUTPUT_TOKENS + block_tokens)
    return LLM(
        model=folder,
        dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,  # modules are timed, which compiled code has none of
        block_size=block_tokens,
        kv_cache_memory_bytes=tokens * token_kv_bytes,
        max_num_seqs=_REQUESTS,
        max_num_batched_tokens=4096,
        max_model_len=512,
        enable_prefix_caching=False,
        seed=0,
    )


class _Clock:
    """Hooks that add up the seconds of layers, GEMMs, attention and head during a step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("layers", "gemms", "attention", "head"), 0.0)
        self.rows = 0

    def watch(self, model: Any) -> None:
        """Add the hooks to a model."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        for layer in model.model.layers:
            self._time(layer, "layers")
        for module in model.modules():
            if isinstance(module, LinearBase):
                self._time(module, "gemms")
            elif isinstance(module, Attention):
                self._time(module, "attention")
            elif isinstance(module, LogitsProcessor):
                self._time(module, "head")

    def _time(self, module: Any, name: str) -> None:
        began = 0.0

        def enter(_: Any, inputs: tuple[Any, ...]) -> None:
            nonlocal began
            if name == "gemms":
                self.rows = len(inputs[0])
            began = time.perf_counter()

        def leave(*_: Any) -> None:
            self.seconds[name] += time.perf_counter() - began

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def timed(self, step: Callable[[], object]) -> tuple[int, dict[str, float]]:
        """Run a step; return the rows of its GEMMs and the seconds of its parts."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        begin = time.perf_counter()
        step()
        return self.rows, {"total": time.perf_counter() - begin, **self.seconds}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
