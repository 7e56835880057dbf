# SPDX-License-Identifier: Apache-2.0
"""Runs real vLLM engines in this process, with and without the plugin, on the same requests."""

import contextlib
import gc
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from benchmarks.harness.cache import publish_dir
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.shapes import random_model_dir
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.adapter.telemetry.figures import read_figures
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.ffn.store.reader import NeuronStore

Tokens = list[list[int]]

_engines = itertools.count()

AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="vLLM's build for this processor has no kernels for this",
)

RELU = "-relu"

PATHS: dict[str, str] = {}
"""Folders of models that a test made itself, by name."""


def model_path(model: str) -> str:
    """Return the folder of ``demo``, of a shape of ``inputs.shapes`` or of a name in ``PATHS``.

    With ``-relu`` behind its name, a gated model has a ReLU in place of SiLU.
    """
    if model in PATHS:
        return PATHS[model]
    body = model.removesuffix(RELU)
    folder = demo_model_dir() if body == "demo" else random_model_dir(body)
    return str(folder if body == model else _with_relu(folder))


def _with_relu(folder: Path) -> Path:
    """Return a folder beside a model's with its weights and with a ReLU."""
    target = folder.with_name(folder.name + RELU)
    if not target.is_dir():
        with publish_dir(target) as staging:
            for path in folder.iterdir():
                if path.name != "config.json":
                    (staging / path.name).symlink_to(path.resolve())
            config = json.loads((folder / "config.json").read_text())
            changed = json.dumps(config | {"hidden_act": "relu"})
            (staging / "config.json").write_text(changed)
    return target


def prepared(model: Path, folder: Path) -> NeuronStore:
    """Return a new store of all neurons in float32, without a predictor."""
    precisions = (Precision.FULL,)
    prepare(model, folder, dtype=torch.float32, precisions=precisions, predictor="none")
    return NeuronStore.open(folder)


def random_prompts(count: int, *, seed: int = 0, longest: int = 80) -> Tokens:
    """Return prompts of 4 to ``longest`` random tokens."""
    rng = random.Random(seed)
    return [
        [rng.randrange(1000, 40000) for _ in range(rng.randrange(4, longest))] for _ in range(count)
    ]


@contextlib.contextmanager
def engine(
    model: str,
    tiered: dict[str, Any] | None = None,
    *,
    weights: dict[str, Any] | None = None,
    ffn: dict[str, Any] | None = None,
    experts: dict[str, Any] | None = None,
    **engine_args: Any,
) -> Iterator[Any]:
    """Yield an in-process ``LLM``; ``tiered`` is the plugin's ``kv`` section, None for vLLM."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.model_executor.models import registry

    # vLLM would inspect each architecture's class in a process, which takes 12 s to import it.
    registry._run_in_subprocess = lambda inspect: inspect()
    keep_kernels()
    manifest.publish_kv(None)
    manifest.publish_weights(None)
    manifest.publish_ffn(None)
    manifest.publish_experts(None)
    manifest.publish_l2(None)
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << (27 if model in ("demo", "deep") else 26),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,  # saves an eighth of a test; requests are tokens
        **engine_args,
    }
    if tiered is not None:
        sections = {"kv": tiered, "weights": weights or {}, "ffn": ffn or {}}
        sections |= {"experts": experts or {}}
        arguments["additional_config"] = {"tiered": sections}
    llm = None
    with young_garbage():
        try:
            llm = LLM(model=model_path(model), **arguments)
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            ensure_kv_transfer_shutdown()
            for collector in list(REGISTRY._collector_to_names):
                if "vllm" in str(REGISTRY._collector_to_names[collector]):
                    REGISTRY.unregister(collector)
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def young_garbage() -> Iterator[None]:
    """Keep the garbage collector away from objects that exist before the engine starts.

    vLLM collects nine times in an engine's life and unfreezes everything as it ends. Each pass over
    all of vLLM's and torch's modules would take half of a test.
    """
    if next(_engines) % 4 == 0:
        gc.unfreeze()
        gc.collect()
    collect, freeze, unfreeze = gc.collect, gc.freeze, gc.unfreeze
    gc.freeze()
    gc.collect = lambda generation=2: 0
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.collect, gc.freeze, gc.unfreeze = collect, freeze, unfreeze
        gc.collect()


@cache
def keep_kernels() -> None:
    """Install vLLM's replacements for its Triton kernels once per process.

    Without Triton vLLM does this at each start of an engine, searching all modules for half a
    second.
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)


def generate(llm: Any, prompts: Tokens, max_tokens: int = 40) -> Tokens:
    """Return greedy continuations of exactly ``max_tokens`` tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(name: str) -> float:
    """Return ``tiered_`` and a figure, or a ``vllm:`` metric, summed as /metrics would show it."""
    if name.startswith("tiered_"):
        return read_figures(REGISTRY.collect())[name.removeprefix("tiered_")]
    names = {f"vllm:{name}", f"vllm:{name}_total"}
    samples = [s for family in REGISTRY.collect() for s in family.samples if s.name in names]
    assert samples, f"no metric {name}"
    return sum(sample.value for sample in samples)


@dataclass
class Run:
    """Outputs of an engine, with its manifest and metrics."""

    tokens: Tokens
    num_blocks: int
    manifest: Any  # None without the plugin
    metrics: dict[str, float] = field(default_factory=dict)


def run(
    model: str,
    prompts: Tokens,
    tiered: dict[str, Any] | None = None,
    *,
    max_tokens: int = 40,
    drive: Callable[[Any], Tokens] | None = None,
    **engine_args: Any,
) -> Run:
    """Start an engine, generate (or ``drive`` it), and shut it down."""
    with engine(model, tiered, **engine_args) as llm:
        tokens = drive(llm) if drive else generate(llm, prompts, max_tokens)
        names = ["num_preemptions"]
        current = manifest.current()
        if current and current.get("kv", {}).get("active"):
            names += ["tiered_kv_read_bytes", "tiered_kv_write_bytes", "tiered_kv_steps"]
            names += ["tiered_kv_blocks_reserved", "tiered_kv_blocks_released"]
            names += ["tiered_kv_far_bytes", "tiered_kv_storage_bytes"]
        cache_config = llm.llm_engine.vllm_config.cache_config
        return Run(
            tokens=tokens,
            num_blocks=cache_config.num_gpu_blocks,
            manifest=current,
            metrics={name: metric(name) for name in names},
        )


@cache
def _vllm_tokens(model: str, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> Tokens:
    # vLLM's classes refuse a ReLU in a gated FFN without the plugin.
    tiered = {"enabled": False} if model.endswith(RELU) else None
    return run(model, [list(prompt) for prompt in prompts], tiered, max_tokens=max_tokens).tokens


def vllm_tokens(model: str, prompts: Sequence[Sequence[int]], max_tokens: int = 40) -> Tokens:
    """Return vLLM's own float32 tokens with ample memory; each distinct call runs one engine."""
    return _vllm_tokens(model, tuple(map(tuple, prompts)), max_tokens)


def layers(count=2, transposed=False):
    for _ in range(count):
        layer = torch.nn.Module()
        layer.fc1 = torch.nn.Linear(64, 64)
        layer.fc2 = torch.nn.Linear(64, 64)
        if transposed:
            layer.fc2.weight.data = layer.fc2.weight.data.t()
        yield layer
