# SPDX-License-Identifier: Apache-2.0
"""A trained model under memory limits: tokens/s of each engine and format in the same memory.

    coder     Qwen2.5-Coder-1.5B (SwiGLU), off its 4-bit grid
    widened   SmolLM2-135M that was fine-tuned to ReLU, several times as wide (widened_model.py):
              what it computes and which neurons it needs are a trained model's, its size is not

Every contender decodes one request under the same limit on its whole process, page cache included:
a share of the 16-bit weights, and what vLLM has resident with an almost empty model, which
llama.cpp and PowerInfer get in addition. vLLM samples behind a prompt of ShareGPT's text, and
PowerInfer goes on greedily; llama.cpp computes every weight for any token. A contender that cannot
start within a limit has no figure there. Streamed weights are written to the disk in a run before.
What each format costs in quality is in `ffn_trained` and `ffn_relufied`.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.harness.memory_limit import can_limit, drop_cached
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.coder_model import coder_model_dir, off_grid_dir
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.quantized_checkpoint import quantized_model_dir
from benchmarks.inputs.relufied_model import Relufying, relufied_model_dir
from benchmarks.inputs.widened_model import widened_model_dir
from benchmarks.peers import LLAMA_BENCH, llama_formats, powerinfer
from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.contender import FIRST_ID, ID_STEP
from vllm_tiered.ffn.prepare.calibration import Calibration
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.ffn.prepare.texts import calibration_texts
from vllm_tiered.ffn.store.format import VERSION as STORE_VERSION
from vllm_tiered.units import GIB

RESULT_KEYS = ("by_limit", "sparse_ratios", "weights_bytes", "is_limited", "definitions")

DEFINITIONS = {
    "by_limit": "by share of the 16-bit weights that the limit allows beside vLLM's own memory"
    " (all: no limit): limit_bytes, and by contender tokens_per_s (over the median time of a token,"
    " median of the rounds), tokens_per_s_by_round and peak_bytes; or why_not. Of the sparse FFN"
    " also, by token: hit_ratio, storage_bytes, far_bytes, wait_seconds and sparse_share of the"
    " layers' steps",
    "sparse_ratios": "by share: tokens/s of the first of the given contenders that is sparse, over"
    " the others', median of the rounds' ratios",
    "is_limited": "whether the limits were enforced",
}

VLLM, VLLM_W4A16 = "vLLM 16 bit", "vLLM W4A16"
STREAMED, STREAMED_INT4 = "streamed 16 bit", "streamed 4 bit"
GGUF = {"llama.cpp 16 bit": "", "llama.cpp Q8_0": "Q8_0", "llama.cpp Q4_K_M": "Q4_K_M"}
"""Formats of llama.cpp's contenders; "" is the model's own."""
_K_QUANTS = {"llama.cpp Q4_K_M"}
POWERINFER = "PowerInfer"

SPARSE: Mapping[str, Mapping[str, Any]] = {
    "sparse 25/25/50": {"mix": (0.25, 0.25, 0.5)},
    "sparse defaults": {},
    "sparse 16 bit": {"mix": (1.0, 0.0, 0.0)},
    "sparse 8 bit": {"mix": (0.0, 1.0, 0.0)},
    "sparse 0/50/50": {"mix": (0.0, 0.5, 0.5)},
    "sparse 25/25/50 no cache": {"mix": (0.25, 0.25, 0.5), "cache": "none"},
    "sparse 25/25/50 window": {"mix": (0.25, 0.25, 0.5), "cache": "window"},
    "sparse 25/25/50 read ahead": {"mix": (0.25, 0.25, 0.5), "preload": "on"},
}
"""The sparse FFN's settings by contender; the others are the defaults."""

_UNLIMITED = "all"
_PROMPT_FILE = "prompt.json"
_SEARCH = 64  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        model: `coder` or `widened`.
        contenders: names; sparse ones need `widened`.
        shares: of the 16-bit weights; above 1 there is no limit.
        copies: how many times as wide `widened` is; llama.cpp's formats in 4 bit need rows of 256
            weights, and so a multiple of 4.
        training_steps: of the model that it is made of.
        near_share: share of the memory left to the FFN that near neurons get; the rest is far.
        temperature: of sampling: greedy text of a small model soon repeats itself.
        calibration_tokens: that `prepare` records.
        peers_python: interpreter with llama.cpp beside it ("": this one).
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    model: str
    contenders: tuple[str, ...]
    shares: tuple[float, ...]
    rounds: int
    new_tokens: int
    copies: int = 4
    training_steps: int = 120
    near_share: float = 0.9
    temperature: float = 1.0
    calibration_tokens: int = 1024
    prompt_tokens: int = 24
    threads: int = 2
    peers_python: str = ""
    folder: str = ""

    @property
    def python(self) -> str:
        """Return the interpreter that has llama.cpp beside it."""
        return self.peers_python or sys.executable

    @property
    def load(self) -> memory_capped.Load:
        """Return what is decoded."""
        return memory_capped.Load(
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, threads=self.threads
        )


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        model="widened",
        contenders=(VLLM, STREAMED, "sparse 25/25/50"),
        shares=(2.0, 0.6),
        rounds=1,
        new_tokens=12,
        calibration_tokens=256,
    ),
    "full": Settings(
        model="widened",
        contenders=(VLLM, VLLM_W4A16, STREAMED, STREAMED_INT4, *SPARSE, *GGUF, POWERINFER),
        shares=(2.0, 0.75, 0.6),
        rounds=2,
        new_tokens=33,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of a model's 16-bit weights, and of a token's KV.

    Attributes:
        weights: all of them.
        ffn: of the FFN's matrices.
        outside: of what no layer has.
    """

    weights: int
    ffn: int
    outside: int
    kv_token_bytes: int

    @classmethod
    def of(cls, model: Path) -> Sizes:
        """Return the sizes of a model of Llama's or Qwen2's layers."""
        checkpoint = Checkpoint(model)
        config = checkpoint.config
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        kv_width = config["num_key_value_heads"] * head_dim
        by_name = {name: checkpoint[name].nbytes for name in checkpoint}
        return cls(
            weights=checkpoint.num_bytes,
            ffn=sum(size for name, size in by_name.items() if ".mlp." in name),
            outside=sum(size for name, size in by_name.items() if ".layers." not in name),
            kv_token_bytes=4 * config["num_hidden_layers"] * kv_width,
        )


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 2 + len(settings.shares) * settings.rounds * len(settings.contenders)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring.

    Raises FileNotFoundError if a model's package is missing, MeasurementError if a peer is, and
    ValueError for a width that llama.cpp has no 4-bit format for.
    """
    if settings.model != "coder" and settings.copies % 4 and _K_QUANTS & {*settings.contenders}:
        raise ValueError(f"copies={settings.copies}: llama.cpp's 4 bit needs a multiple of 4")
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = _model_dir(settings, folder)
    sizes = Sizes.of(model)
    files = _files(settings, model, folder)
    step(f"{model.name}: {sizes.weights / 1e9:.1f} GB, {sizes.ffn / 1e9:.1f} of it in the FFN")
    resident = memory_capped.vllm_bytes(settings.load, folder)
    step(f"vLLM alone has {resident / 1e9:.2f} GB resident")
    sparse = next((name for name in settings.contenders if name in SPARSE), "")
    by_limit: dict[str, Any] = {}
    rounds_of: dict[str, list[dict[str, float]]] = {}
    for share in settings.shares:
        limit = None if share > 1 else int(share * sizes.weights) + resident
        key = _UNLIMITED if limit is None else f"{share:g}"
        commands = dict(_commands(settings, model, files, sizes, share))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings.contenders}
        why_not: dict[str, str] = {}
        for name in {STREAMED, STREAMED_INT4} & {*settings.contenders}:
            with contextlib.suppress(MeasurementError):  # it is said when it is measured
                memory_capped.measure(
                    name, commands[name], limit if can_limit() else None, settings.threads
                )
        for index in range(settings.rounds):
            for name, command in memory_capped.rotated(list(commands.items()), index):
                if name not in why_not:
                    drop_cached([folder, model])
                    try:
                        found = memory_capped.measure(
                            name, command, limit if can_limit() else None, settings.threads
                        )
                        runs[name].append(found)
                        text = f"{memory_capped.tokens_per_s(found):.3f} tokens/s"
                    except MeasurementError as error:
                        why_not[name] = str(error)
                        text = str(error).partition("\n")[0]
                else:
                    text = "left out"
                step(f"{key}: {name}: {text}")
        by_limit[key] = {"limit_bytes": limit, "contenders": _figures(runs, why_not)}
        rounds_of[key] = [
            {
                name: memory_capped.tokens_per_s(found[index])
                for name, found in runs.items()
                if len(found) > index
            }
            for index in range(settings.rounds)
        ]
    return {
        "by_limit": by_limit,
        "sparse_ratios": {key: _ratios(sparse, rounds) for key, rounds in rounds_of.items()},
        "weights_bytes": sizes.weights,
        "ffn_bytes": sizes.ffn,
        "resident_bytes": resident,
        "is_limited": can_limit(),
        "model": model.name,
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a row a contender: tokens/s by limit, then what the sparse ones read."""
    by_limit = result["by_limit"]
    names = list(next(iter(by_limit.values()))["contenders"])
    found_of = [one["contenders"] for one in by_limit.values()]
    rows = [
        [name, *(number(found[name].get("tokens_per_s"), 2) for found in found_of)]
        for name in names
    ]
    headings = ["tokens/s by share of the weights", *by_limit]
    reads = [
        [
            f"{name}, {key}",
            number(100 * found["hit_ratio"], 1),
            number(found["storage_bytes"] / 1e6, 1),
            number(1000 * found["wait_seconds"], 1),
            number(100 * found["sparse_share"], 0),
        ]
        for key, one in by_limit.items()
        for name, found in one["contenders"].items()
        if "hit_ratio" in found
    ]
    text = markdown(headings, rows)
    if not reads:
        return text
    headings = ["a token's neurons", "hits %", "MB from disk", "waited ms", "sparse steps %"]
    return f"{text}\n\n{markdown(headings, reads)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    prompt: Path
    w4a16: Path
    streamed: Path
    store: Path
    gguf: Mapping[str, Path]


def _model_dir(settings: Settings, folder: Path) -> Path:
    if settings.model == "coder":
        return off_grid_dir(coder_model_dir())
    source = relufied_model_dir(Relufying(steps=settings.training_steps))
    return widened_model_dir(source, settings.copies, folder)


def _files(settings: Settings, model: Path, folder: Path) -> _Files:
    """Write, on first use, what the contenders read."""
    prompt = folder / _PROMPT_FILE
    tokenizer = model if (model / "tokenizer.json").is_file() else demo_model_dir()
    text = calibration_texts(tokenizer, settings.prompt_tokens, tokens_per_text=256)[0]
    prompt.write_text(json.dumps(text.token_ids[: settings.prompt_tokens]), encoding="utf-8")
    w4a16 = folder / f"{model.name}-w4a16"
    if VLLM_W4A16 in settings.contenders and not w4a16.is_dir():
        with publish_dir(w4a16) as staging:
            quantized_model_dir(model, "compressed_int4", staging)
    store = folder / f"{model.name}-neurons{STORE_VERSION}"
    if set(SPARSE) & set(settings.contenders) and not store.is_dir():
        # Mixes are given, so that the search for one may be short.
        tokens = settings.calibration_tokens
        prepare(model, store, calibration=Calibration(num_tokens=tokens, search_tokens=_SEARCH))
    gguf = {}
    work = folder / "peers" / model.name
    work.mkdir(parents=True, exist_ok=True)
    for name in {POWERINFER, *GGUF} & set(settings.contenders):
        of = powerinfer if name == POWERINFER else llama_formats
        if lacking := of.missing(settings.python):
            raise MeasurementError(f"{name}: {lacking}")
        if name == POWERINFER:
            gguf[name] = powerinfer.converted(model, work, settings.copies)
        else:
            form = GGUF[name]
            gguf[name] = llama_formats.quantised(
                settings.python, model, work, form, settings.threads
            )
    return _Files(
        prompt=prompt,
        w4a16=w4a16,
        streamed=folder / f"{model.name}-streamed",
        store=store,
        gguf=gguf,
    )


def _commands(
    settings: Settings, model: Path, files: _Files, sizes: Sizes, share: float
) -> Iterator[tuple[str, list[str]]]:
    """Yield each contender's command line for weights of such a share of the model's bytes."""
    kv_bytes = settings.load.kv_bytes(sizes)
    left = share * sizes.weights - kv_bytes - memory_capped.MARGIN_BYTES
    near_weights = (sizes.weights if share > 1 else max(0.0, left - sizes.outside)) / GIB
    near_ffn = max(0.0, left - (sizes.weights - sizes.ffn)) / GIB
    extra = ("--prompt-file", str(files.prompt), "--temperature", str(settings.temperature))

    def ours(tiered: Mapping[str, Any] | None, served: Path = model) -> list[str]:
        return memory_capped.decode_command(settings.load, served, kv_bytes, tiered, *extra)

    def streamed(name: str) -> dict[str, Any]:
        folder = files.streamed / f"{share:g}" / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "placement": "latency",
            "near_gib": near_weights,
            "far_gib": 0,
            "storage_path": str(folder),
        }

    for name in settings.contenders:
        if name == VLLM:
            yield name, ours(None)
        elif name == VLLM_W4A16:
            yield name, ours(None, files.w4a16)
        elif name == STREAMED:
            yield name, ours({"weights": streamed(name)})
        elif name == STREAMED_INT4:
            yield name, ours({"weights": {**streamed(name), "compress": "int4"}})
        elif name in SPARSE:
            near, far = settings.near_share * near_ffn, (1 - settings.near_share) * near_ffn
            # Without a limit all precisions of all neurons are in memory.
            limits = {"far_gib": 2 * sizes.ffn / GIB}
            if share <= 1:
                limits = {"near_gib": near, "far_gib": far}
            yield name, ours({"ffn": {"store": str(files.store), **SPARSE[name], **limits}})
        elif name == POWERINFER:
            given = (files.gguf[name], files.prompt, settings.new_tokens, settings.threads)
            yield name, powerinfer.command(settings.python, *given)
        else:
            numbers = (settings.prompt_tokens, settings.new_tokens, settings.threads)
            program = str(Path(settings.python).parent / LLAMA_BENCH)
            line = [program, str(files.gguf[name]), *map(str, (*numbers, FIRST_ID, ID_STEP)), "-"]
            yield name, line


def _figures(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], why_not: Mapping[str, str]
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, of in runs.items():
        if name in why_not:
            figures[name] = {"why_not": why_not[name]}
            continue
        rates = [memory_capped.tokens_per_s(one) for one in of]
        figures[name] = {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_by_round": rates,
            "peak_bytes": max((one["peak_bytes"] or 0) for one in of) or None,
        }
        if name in SPARSE:
            figures[name] |= _use(of)
    return figures


def _use(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the sparse FFN's figures by token, as medians of the rounds."""

    def a_token(key: str) -> float:
        return statistics.median(
            float(one["use"].get(f"ffn_{key}", 0.0)) / len(one["seconds_per_token"]) for one in runs
        )

    hits, misses = a_token("hits"), a_token("misses")
    sparse, dense = a_token("sparse_steps"), a_token("dense_steps")
    return {
        "hit_ratio": hits / max(1e-9, hits + misses),
        "storage_bytes": a_token("storage_bytes"),
        "far_bytes": a_token("far_bytes"),
        "wait_seconds": a_token("wait_seconds"),
        "sparse_share": sparse / max(1e-9, sparse + dense),
    }


def _ratios(first: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return one contender's tokens/s over each other's."""
    in_all = set.intersection(*map(set, rounds))
    if first not in in_all:
        return {}
    return {
        name: statistics.median(one[first] / one[name] for one in rounds)
        for name in rounds[0]
        if name in in_all and name != first
    }
