# SPDX-License-Identifier: Apache-2.0
"""FFNs from a neuron store are never in a CUDA graph."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_tiered.adapter.ffn.graphs import OP, split_at_ffn
from vllm_tiered.errors import UnsupportedError


def attention_ops() -> list[str]:
    """That vLLM splits graphs at."""
    from vllm.config import CompilationConfig

    return list(CompilationConfig._attention_ops)


def config_of(mode: str, *, compiled: bool = True, ops: list[str] | None = None) -> Any:
    """As vLLM leaves it when the configuration is made."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE,
        cudagraph_mode=CUDAGraphMode[mode],
        splitting_ops=attention_ops() if ops is None else ops,
        cudagraph_capture_sizes=[1, 2, 4],
        max_cudagraph_capture_size=4,
    )
    return SimpleNamespace(compilation_config=compilation)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("PIECEWISE", "PIECEWISE"),
        ("FULL_AND_PIECEWISE", "PIECEWISE"),
        ("FULL", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "PIECEWISE"),
        ("NONE", "NONE"),
    ],
)
def test_graphs_end_before_it(caplog, mode, expected):
    config = config_of(mode)
    with caplog.at_level(logging.WARNING, "vllm.tiered"):
        split_at_ffn(config)
        split_at_ffn(config)  # in a process that vLLM's configuration came to
    compilation = config.compilation_config
    assert compilation.cudagraph_mode.name == expected
    assert compilation.cudagraph_capture_sizes == [1, 2, 4]
    assert compilation.splitting_ops == attention_ops() + [OP] * (expected == "PIECEWISE")
    assert caplog.text.count("tiered ffn: CUDA graphs are") == (mode != expected)


@pytest.mark.parametrize("why", ["not compiled", "not split", "split elsewhere", "breakable"])
def test_where_nothing_can_be_split_there_are_none(monkeypatch, caplog, why):
    if why == "breakable":
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    ops = {"not split": [], "split elsewhere": ["vllm::moe_forward"]}.get(why)
    config = config_of("FULL", compiled=why != "not compiled", ops=ops)
    split_at_ffn(config)
    compilation = config.compilation_config
    assert compilation.cudagraph_mode.name == "NONE"
    assert not compilation.cudagraph_capture_sizes and not compilation.max_cudagraph_capture_size
    assert OP not in compilation.splitting_ops
    assert "CUDA graphs are NONE instead of FULL" in caplog.text


class Layer(nn.Module):
    """Something, the FFN, and something else."""

    def __init__(self) -> None:
        super().__init__()
        from vllm_tiered.adapter.ffn.modules import FfnSizes, SparseFfn, register_op

        register_op()
        sizes = FfnSizes(
            hidden=8,
            neurons=16,
            gated=False,
            activation="ReLU",
            first_bias=False,
            last_bias=False,
            dtype=torch.float32,
        )
        self.ffn = SparseFfn("a layer", sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.ffn(x + 1)
        doubled: torch.Tensor = y * 2
        return doubled


def test_vllm_splits_the_model_there():
    """Its output is allocated in the piece before, so that the address is always the same."""
    from vllm.compilation.backends import split_graph

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return lambda *args: (args[0],)

    layer = Layer()
    torch.compile(layer, backend=keep, fullgraph=True)(torch.ones(3, 8))
    (graph,) = graphs
    _, pieces = split_graph(graph, [OP])
    found = [
        (piece.is_splitting_graph, [str(node.target) for node in piece.graph.graph.nodes])
        for piece in pieces
    ]
    assert [is_split for is_split, _ in found] == [False, True, False]
    before, at, _ = (" ".join(names) for _, names in found)
    assert "empty_like" in before and "sparse_ffn" in at and "empty_like" not in at


def test_what_the_op_does_to_its_arguments_is_declared():
    from vllm_tiered.adapter.ffn.modules import register_op

    register_op()
    returned = torch.ops.tiered.sparse_ffn.default._schema
    assert [one.is_write for one in (a.alias_info for a in returned.arguments) if one] == [True]
    assert not returned.returns


def test_it_refuses_to_be_captured(monkeypatch):
    from vllm_tiered.adapter.ffn import modules as ffn_modules

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(UnsupportedError, match="captured in a CUDA graph"):
        ffn_modules._sparse_ffn(x, x, "a layer")


def of_step(monkeypatch, module: Any, metadata: Any) -> None:
    from vllm_tiered.adapter.ffn import modules as ffn_modules

    context = SimpleNamespace(no_compile_layers={"a layer": module}, attn_metadata=metadata)
    monkeypatch.setattr(ffn_modules, "get_forward_context", lambda: context)


def test_what_fills_a_graphs_batch_chooses_no_neurons(monkeypatch):
    """vLLM's metadata counts the tokens of requests; behind them is anything."""
    from vllm_tiered.adapter.ffn import modules as ffn_modules

    seen: list[tuple[int, bool]] = []

    def compute(x_BH: torch.Tensor, only_decodes: bool) -> torch.Tensor:
        seen.append((len(x_BH), only_decodes))
        return x_BH + 1

    module = SimpleNamespace(compute=compute, rehearse=None)
    x_BH, out_BH = torch.ones(4, 8), torch.full((4, 8), torch.nan)
    of_step(monkeypatch, module, {"l": SimpleNamespace(num_actual_tokens=3, max_query_len=1)})
    ffn_modules._sparse_ffn(x_BH, out_BH, "a layer")
    assert seen == [(3, True)] and out_BH.sum(dim=1).tolist() == [16, 16, 16, 0]


def test_a_step_of_which_vllm_says_nothing_is_computed(monkeypatch):
    """Only one without any metadata is a dummy: zeros for another would be wrong, and silent."""
    from vllm_tiered.adapter.ffn import modules as ffn_modules

    module = SimpleNamespace(compute=lambda x_BH, only_decodes: x_BH + 1, rehearse=None)
    out_BH = torch.full((4, 8), torch.nan)
    of_step(monkeypatch, module, {})
    ffn_modules._sparse_ffn(torch.ones(4, 8), out_BH, "a layer")
    assert bool((out_BH == 2).all())


def test_steps_of_a_capture_choose_none_either(monkeypatch):
    """Though vLLM gives them an attention's metadata; nor are they rehearsals."""
    from vllm_tiered.adapter.ffn import modules as ffn_modules

    module = SimpleNamespace(compute=pytest.fail, rehearse=pytest.fail)
    out_BH = torch.full((4, 8), torch.nan)
    of_step(monkeypatch, module, {"l": SimpleNamespace(num_actual_tokens=4, max_query_len=1)})
    with ffn_modules.capture():
        ffn_modules._sparse_ffn(torch.ones(4, 8), out_BH, "a layer")
    assert not out_BH.any()


def test_dummy_steps_are_rehearsed(monkeypatch):
    from vllm_tiered.adapter.ffn import modules as ffn_modules

    seen: list[int] = []
    module = SimpleNamespace(compute=pytest.fail, rehearse=lambda x_BH: seen.append(len(x_BH)))
    out_BH = torch.full((4, 8), torch.nan)
    of_step(monkeypatch, module, None)
    ffn_modules._sparse_ffn(torch.ones(4, 8), out_BH, "a layer")
    assert seen == [4] and not out_BH.any()
