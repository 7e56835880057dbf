# SPDX-License-Identifier: Apache-2.0
"""FlexGen 0.1.8 on a CPU, patched at run time: no file of FlexGen is changed.

Its "GPU" tier is DRAM that the CPU computes from, and its disk tier is the file system. Its CPU
tier stays empty, as it would be a second copy in the same DRAM. Sublayers are read while others
compute, as FlexGen does (overlap, batch 1). Weights are float16, as FlexGen requires: the same
bytes.

FlexGen places whole matrices by a percentage for each sublayer's list, so the bytes that stay in
memory jump: 30 % of OPT keeps 42 % of a layer. `percent_for_share` takes the largest percentage
whose matrices fit the requested share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.harness.cache import publish_dir
from benchmarks.peers.checkpoint import Bf16, Checkpoint, to_float32
from benchmarks.peers.contender import (
    parse_arguments,
    prepare_torch,
    prompt_ids,
    report,
    stdout_to_stderr,
)

_NAME = "opt-peer"  # FlexGen reads `NAME-np/` inside the folder it is given
_ROWS_AT_ONCE = 4096
_ITEM_BYTES = 2


def sublayer_sizes(config: dict[str, Any]) -> list[list[int]]:
    """Return the bytes of the weights in each list that FlexGen places, in its order.

    Embeddings are tied in the model; FlexGen holds them twice, at the input and at the output.
    """
    hidden, ffn = config["hidden_size"], config["ffn_dim"]
    tokens = config["vocab_size"] * hidden
    positions = (config["max_position_embeddings"] + 2) * hidden
    attention = [hidden * hidden, hidden] * 4 + [hidden, hidden]
    mlp = [hidden * ffn, ffn, hidden * ffn, hidden, hidden, hidden]
    lists = [[tokens, positions]]
    lists += [attention, mlp] * config["num_hidden_layers"]
    lists += [[hidden, hidden, tokens]]
    return [[_ITEM_BYTES * size for size in sizes] for sizes in lists]


def resident_bytes(sizes: list[list[int]], percent: int) -> int:
    """Return the bytes that FlexGen keeps in memory at this percentage.

    As in its `init_weight_list`, the disk takes the first matrices of each list, memory the last.
    """
    total = 0
    for sublayer in sizes:
        ends = np.cumsum(sublayer)
        middles = (ends - np.array(sublayer) / 2) / ends[-1] * 100
        total += int(np.array(sublayer)[middles >= 100 - percent].sum())
    return total


def percent_for_share(sizes: list[list[int]], share: float) -> int:
    """Return the largest percentage whose resident bytes are at most `share` of all bytes."""
    allowed = share * sum(map(sum, sizes))
    return max(percent for percent in range(101) if resident_bytes(sizes, percent) <= allowed)


def convert(model: Path, target: Path) -> None:
    """Write the model's tensors as FlexGen's float16 .npy files, published by one rename."""
    checkpoint = Checkpoint(model)
    with publish_dir(target) as staging:
        for name in checkpoint:
            short = name.removeprefix("model.")
            # FlexGen's name of the norm after the last layer, as its own converter gives it.
            short = short.replace("decoder.final_layer_norm", "decoder.layer_norm")
            with (staging / short).open("wb") as file:
                _write_npy(file, checkpoint[name])


def _write_npy(file: BinaryIO, bits: Bf16) -> None:
    header = {"descr": "<f2", "fortran_order": False, "shape": bits.shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call]
    for start in range(0, len(bits), _ROWS_AT_ONCE):
        file.write(to_float32(bits[start : start + _ROWS_AT_ONCE]).astype("<f2").tobytes())


class _NoStream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def _patch_torch() -> None:
    """Replace the CUDA calls of torch that FlexGen makes by functions that do nothing."""
    import torch

    plain_empty: Any = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return plain_empty(*args, **kwargs)

    patches: dict[str, Any] = {
        "Stream": _NoStream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
    }
    for name, replacement in patches.items():
        setattr(torch.cuda, name, replacement)
    setattr(torch, "empty", empty)  # noqa: B010
    setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)  # noqa: B010


def _link_disk_weights() -> None:
    """Let FlexGen's disk tier link the converted files, where it would copy all their bytes."""
    from flexgen.pytorch_backend import DeviceType, TorchTensor

    copy_into: Any = TorchTensor.load_from_np_file

    def load_from_np_file(self: Any, filename: str) -> None:
        if self.device.device_type == DeviceType.DISK:
            os.unlink(self.data)
            os.link(filename, self.data)
        else:
            copy_into(self, filename)

    TorchTensor.load_from_np_file = load_from_np_file


def _load(config: dict[str, Any], weights: Path, disk: Any, percent: int) -> Any:
    import flexgen.flex_opt as flex_opt
    from flexgen.opt_config import OptConfig

    memory = flex_opt.TorchDevice("cpu")
    memory.name = "dram-as-gpu"
    cpu = flex_opt.TorchDevice("cpu")
    mixed = flex_opt.TorchMixedDevice([memory, cpu, disk])
    env = flex_opt.ExecutionEnv(gpu=memory, cpu=cpu, disk=disk, mixed=mixed)
    compression = flex_opt.CompressionConfig(
        num_bits=4, group_size=64, group_dim=0, symmetric=False
    )
    policy = flex_opt.Policy(
        gpu_batch_size=1,
        num_gpu_batches=1,
        w_gpu_percent=percent,
        w_cpu_percent=0,
        cache_gpu_percent=100,
        cache_cpu_percent=0,
        act_gpu_percent=100,
        act_cpu_percent=0,
        overlap=True,
        sep_layer=True,
        pin_weight=False,
        cpu_cache_compute=False,
        attn_sparsity=1.0,
        compress_weight=False,
        comp_weight_config=compression,
        compress_cache=False,
        comp_cache_config=compression,
    )
    sizes = OptConfig(
        name=_NAME,
        max_seq_len=config["max_position_embeddings"],
        num_hidden_layers=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
        input_dim=config["hidden_size"],
        ffn_embed_dim=config["ffn_dim"],
        vocab_size=config["vocab_size"],
    )
    return flex_opt.OptLM(sizes, env, str(weights), policy)


@contextlib.contextmanager
def _disk_tier(folder: Path) -> Iterator[Any]:
    """Yield FlexGen's disk tier on an empty folder, which is removed afterwards."""
    from flexgen.flex_opt import TorchDisk  # importing it also completes `pytorch_backend`

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    disk = TorchDisk(str(folder))
    try:
        yield disk
    finally:
        # Its copy threads are not daemons: unless closed, they would keep the process alive.
        disk.close_copy_threads()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Convert, or generate and report."""
    arguments = parse_arguments(__doc__)
    target = arguments.work / f"{_NAME}-np"
    if arguments.prepare:
        if not target.is_dir():
            convert(arguments.model, target)
        return
    if not target.is_dir():
        sys.exit(f"{target} is absent: run this with --prepare first")
    prepare_torch(arguments.threads)
    _patch_torch()
    _link_disk_weights()
    config = Checkpoint(arguments.model).config
    sizes = sublayer_sizes(config)
    percent = percent_for_share(sizes, arguments.resident_share)
    with stdout_to_stderr(), _disk_tier(arguments.work / "offload") as disk:
        from flexgen.timer import timers

        start = time.perf_counter()
        model = _load(config, arguments.work, disk, percent)
        load_seconds = time.perf_counter() - start
        prompt = [prompt_ids(arguments.prompt_tokens)]
        model.generate(prompt, max_new_tokens=arguments.new_tokens)
    report(
        "flexgen",
        "flexgen",
        load_seconds=load_seconds,
        seconds=list(timers("generate").costs),
        new_tokens=arguments.new_tokens,
        model_bytes=sum(map(sum, sizes)),
        resident_bytes=resident_bytes(sizes, percent),
    )


if __name__ == "__main__":
    main()
