# SPDX-License-Identifier: Apache-2.0
"""Table of the benchmarks, and the interface of their modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.suites.gpu.parts import PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """An entry of the table of benchmarks.

    `module` has these names:

    * `PROFILES`: profile name to a frozen dataclass of settings,
    * `RESULT_KEYS`: the least keys of its result,
    * `num_steps(settings)`: how often `run` calls `step`, for the progress display,
    * `run(settings, step)`: measures and returns the result, JSON-safe; raises MeasurementError
      rather than return figures that may not be reported,
    * `table(result)`, optional: Markdown for people to read.
    """

    name: str
    summary: str
    module: str


BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="kv_swap",
            summary="throughput with too little KV memory: vLLM alone, with the plugin, unlimited",
            module="benchmarks.suites.kv.swap",
        ),
        Benchmark(
            name="kv_adaptive",
            summary="expansion=auto against the best fixed expansion, by workload and KV memory",
            module="benchmarks.suites.kv.adaptive",
        ),
        Benchmark(
            name="kv_rate",
            summary="throughput and latency over the rate at which requests arrive",
            module="benchmarks.suites.kv.rate",
        ),
        Benchmark(
            name="kv_storage",
            summary="far KV pages on an SSD against preempting and computing again",
            module="benchmarks.suites.kv.storage",
        ),
        Benchmark(
            name="model_support",
            summary="how many of the models in vLLM's recipes each part takes",
            module="benchmarks.suites.support.models",
        ),
        Benchmark(
            name="kv_soak",
            summary="minutes of random load: integrity, memory growth, float32 control",
            module="benchmarks.suites.kv.soak",
        ),
        Benchmark(
            name="kv_policy",
            summary="policies of what is far and when it is read: layers, blocks, on demand",
            module="benchmarks.suites.kv.policy",
        ),
        Benchmark(
            name="kv_groups",
            summary="long contexts on models with windows, latent attention or recurrent states",
            module="benchmarks.suites.kv.groups",
        ),
        Benchmark(
            name="kv_narrow",
            summary="far KV pages in 8 bits: quality of the output, and speed by bandwidth",
            module="benchmarks.suites.kv.narrow",
        ),
        Benchmark(
            name="kv_prefix",
            summary="prefixes that have left near memory: conversations and questions on texts",
            module="benchmarks.suites.kv.prefix",
        ),
        Benchmark(
            name="copy_cost",
            summary="what copies cost the model that computes meanwhile: the limit on this machine",
            module="benchmarks.suites.kv.copy_cost",
        ),
        Benchmark(
            name="weights_placement",
            summary="time between tokens and throughput by where weights live, on HeLM's links",
            module="benchmarks.suites.weights.placement",
        ),
        Benchmark(
            name="helm_paper",
            summary="HeLM's table IV and figures 11 to 13 from the cost model: computed",
            module="benchmarks.suites.papers.helm_paper",
        ),
        Benchmark(
            name="dse",
            summary="PRESERVE's design space of an accelerator from the model: computed",
            module="benchmarks.suites.papers.dse",
        ),
        Benchmark(
            name="weights_storage",
            summary="a model that memory does not hold, from an SSD, against what people use today",
            module="benchmarks.suites.weights.storage",
        ),
        Benchmark(
            name="experts_offload",
            summary="a mixture that memory does not hold, experts from an SSD, against llama.cpp",
            module="benchmarks.suites.experts.offload",
        ),
        Benchmark(
            name="experts_routing",
            summary="a trained mixture's routing: hits by slots and policy, and reading ahead",
            module="benchmarks.suites.experts.routing",
        ),
        Benchmark(
            name="planner_accuracy",
            summary="predicted against measured time per token, from a probe of the same run",
            module="benchmarks.suites.weights.planner_accuracy",
        ),
        Benchmark(
            name="weights_int4",
            summary="perplexity with the layers' matrices in 4 bit against 16 bit",
            module="benchmarks.suites.weights.int4",
        ),
        Benchmark(
            name="ffn_kernels",
            summary="matmuls over cached neurons in 16, 8 and 4 bit against the rate of memory",
            module="benchmarks.suites.ffn.kernels",
        ),
        Benchmark(
            name="ffn_flash",
            summary="what a token's FFN costs to read, by technique, and in vLLM: synthetic"
            " sparsity",
            module="benchmarks.suites.ffn.flash",
        ),
        Benchmark(
            name="ffn_mixed",
            summary="mixed-precision neurons against streaming layers under one limit: synthetic"
            " sparsity",
            module="benchmarks.suites.ffn.mixed",
        ),
        Benchmark(
            name="ffn_reads",
            summary="scattered reads of neurons, and how long a hole is worth reading over",
            module="benchmarks.suites.ffn.reads",
        ),
        Benchmark(
            name="ffn_batch",
            summary="where the sparse FFN stops paying as the batch grows: synthetic sparsity",
            module="benchmarks.suites.ffn.batch",
        ),
        Benchmark(
            name="ffn_prefill",
            summary="time to the first token from a store on the disk, by the prompt's precision",
            module="benchmarks.suites.ffn.prefill",
        ),
        Benchmark(
            name="ffn_nested",
            summary="a trained FFN in 4 bit whose important neurons are read in 8: KL over bits",
            module="benchmarks.suites.ffn.nested",
        ),
        Benchmark(
            name="ffn_relufied",
            summary="a model fine-tuned from SiLU to ReLU: perplexity over active neurons, reads",
            module="benchmarks.suites.ffn.relufied",
        ),
        Benchmark(
            name="ffn_relufied_io",
            summary="a token's reads by technique, with a trained ReLU model's activity",
            module="benchmarks.suites.ffn.relufied_io",
        ),
        Benchmark(
            name="ffn_ladder",
            summary="a trained model under memory limits: each engine and format at its best",
            module="benchmarks.suites.ffn.ladder",
        ),
        Benchmark(
            name="ffn_trained",
            summary="a trained SwiGLU model: memory, speed, divergence and HumanEval by format",
            module="benchmarks.suites.ffn.trained",
        ),
        Benchmark(
            name="tp_ray",
            summary="one rank against two, over vLLM's processes and over Ray, by part",
            module="benchmarks.suites.weights.tp_ray",
        ),
        Benchmark(
            name="l2_prefetch",
            summary="prefetching behind all-reduces, on against off: two ranks on two cores",
            module="benchmarks.suites.l2.prefetch",
        ),
        Benchmark(
            name="kv_simulate",
            summary="expansion=auto on other machines and loads: a simulation",
            module="benchmarks.suites.kv.simulate",
        ),
        Benchmark(
            name="kv_policies",
            summary="policies of reading far KV, Pie's own among them: a simulation",
            module="benchmarks.suites.kv.policies",
        ),
        *(
            Benchmark(name=f"gpu_{name}", summary=summary, module=f"benchmarks.suites.gpu.{name}")
            for name, summary in PARTS.items()
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBenchmark:
    """A benchmark's module, after checking that its parts exist."""

    profiles: Mapping[str, Any]
    result_keys: frozenset[str]
    num_steps: Callable[[Any], int]
    run: Callable[[Any, Step], dict[str, Any]]
    table: Callable[[Mapping[str, Any]], str] | None = None


def load(name: str) -> LoadedBenchmark:
    """Import a benchmark by name. Raises KeyError, naming the known ones, if it is unknown."""
    if name not in BENCHMARKS:
        raise KeyError(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    module = import_module(BENCHMARKS[name].module)
    return LoadedBenchmark(
        profiles=module.PROFILES,
        result_keys=frozenset(module.RESULT_KEYS),
        num_steps=module.num_steps,
        run=module.run,
        table=getattr(module, "table", None),
    )


def with_overrides(settings: Any, overrides: list[str]) -> Any:
    """Return the settings with `key=value` overrides applied.

    A value is parsed as the type of the present one. Tuples are separated by commas; an empty text
    is an empty tuple. Raises ValueError, naming the known keys, for an unknown key or a value of
    the wrong type.
    """
    known = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    changes = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in known:
            raise ValueError(f"no setting {key!r}; there are: {', '.join(known)}")
        changes[key] = _parse(text, known[key], key)
    return dataclasses.replace(settings, **changes)


def _parse(text: str, present: Any, key: str) -> Any:
    if isinstance(present, tuple):
        return tuple(_parse(item, present[0], key) for item in text.split(",")) if text else ()
    if isinstance(present, bool):
        if text not in ("true", "false"):
            raise ValueError(f"setting {key}={text!r}: expected true or false")
        return text == "true"
    try:
        return type(present)(text)
    except ValueError:
        raise ValueError(f"setting {key}={text!r}: expected {type(present).__name__}") from None
