# SPDX-License-Identifier: Apache-2.0
"""The check of where far weights are read, on modules without an engine, and its hooks."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.offloader import set_offloader
from vllm.model_executor.offloader.base import NoopOffloader

from vllm_tiered.adapter.weights import loading
from vllm_tiered.adapter.weights.hooks import FarParameter, reader_of, register_hooks
from vllm_tiered.adapter.weights.offloader import TieredOffloader
from vllm_tiered.adapter.weights.read_check import check_reads
from vllm_tiered.config import WeightsConfig
from vllm_tiered.errors import UnsupportedError


class Layer(nn.Module):
    """Two linear layers in one weight buffer, and what else reads one of them."""

    def __init__(self, read: Any = None) -> None:
        super().__init__()
        memory = torch.zeros(2, 8, 8)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.first.weight.data, self.second.weight.data = memory
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return x if self.read is None else self.read(self, x)

    def far(self) -> list[FarParameter]:
        owners = (("first", self.first, 0), ("second", self.second, 0))
        return [
            FarParameter(self, path, owner, "weight", position, owner.weight)
            for path, owner, position in owners
        ]


def runner_of(model: nn.Module, run: Any = None, *, quantised: bool = False) -> Any:
    def dummy_run(count: int, is_profile: bool) -> None:
        assert is_profile
        with torch.inference_mode():
            model(torch.ones(count, 8))

    return SimpleNamespace(
        model=model,
        max_num_tokens=400 if quantised else 4,
        vllm_config=SimpleNamespace(
            use_v2_model_runner=False,
            quant_config=object() if quantised else None,
            model_config=SimpleNamespace(enforce_eager=False),
            compilation_config=SimpleNamespace(mode=3),
        ),
        _dummy_run=run or dummy_run,
    )


READS = {
    "a product": lambda layer, x: x @ layer.first.weight,
    "a product with a view": lambda layer, x: x @ layer.second.weight.t()[:, 1:],
    "a copy": lambda layer, x: x + layer.first.weight.clone().sum(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_outside_of_the_owners_call_are_found(name):
    layer = Layer(READS[name])
    expected = "second" if "view" in name else "first"
    with pytest.raises(UnsupportedError, match=rf"Layer reads {expected}\.weight outside"):
        check_reads(runner_of(layer), layer.far(), NoopOffloader())


@pytest.mark.parametrize(
    "read",
    [
        None,
        lambda layer, x: x.to(layer.first.weight.dtype),
        lambda layer, x: x + layer.first.weight.shape[0],
        lambda layer, x: (layer.first.weight.t(), x)[1],
        lambda layer, x: x + torch.nn.functional.linear(x, torch.ones(8, 8)),
    ],
)
def test_what_reads_no_bytes_is_fine(read):
    layer = Layer(read)
    check_reads(runner_of(layer), layer.far(), NoopOffloader())
    assert not layer.first._forward_hooks and not layer.first._forward_pre_hooks


def test_another_modules_call_is_not_the_owners():
    """Both are in one sublayer's buffer, but only the owner has waited for it."""
    layer = Layer()
    layer.first.register_forward_hook(lambda module, args, out: out + layer.second.weight.sum())
    layer.register_module("twin", nn.Identity())
    with pytest.raises(UnsupportedError, match=r"reads second\.weight outside"):
        check_reads(runner_of(layer), layer.far(), NoopOffloader())


def test_a_parameter_with_two_owners_is_refused():
    layer = Layer()
    model = nn.Module()
    model.layer, model.head = layer, nn.Linear(8, 8, bias=False)
    model.head.weight = layer.first.weight
    with pytest.raises(UnsupportedError, match=r"first\.weight belongs to several modules"):
        check_reads(runner_of(model), layer.far(), NoopOffloader())


def test_a_dummy_run_that_fails_stops_no_start(caplog):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no dummies on Thursdays")

    layer = Layer()
    with caplog.at_level(logging.WARNING, "vllm.tiered"):
        check_reads(runner_of(layer, fail), layer.far(), NoopOffloader())
    assert "no dummies on Thursdays" in caplog.text


def test_models_are_not_compiled_for_it():
    layer = Layer()
    seen: list[Any] = []

    def read(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        seen.append(vars(layer)["do_not_compile"])
        return x

    vars(layer)["do_not_compile"] = False
    layer.read = read
    check_reads(runner_of(layer), layer.far(), NoopOffloader())
    assert seen == [True] and vars(layer)["do_not_compile"] is False


def test_quantised_layers_are_tried_with_many_rows():
    """A method may unpack its weights for many rows alone."""

    class Unpacking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight.float() * 2 if len(x) >= 256 else self.weight
            return x @ weight.t()

    layer = Layer()
    layer.second.__class__ = Unpacking
    check_reads(runner_of(layer), layer.far(), NoopOffloader())
    with pytest.raises(UnsupportedError, match=r"second\.weight are unpacked before"):
        check_reads(runner_of(layer, quantised=True), layer.far(), NoopOffloader())


def test_the_offloaders_own_copies_are_no_reads():
    layer = Layer()

    class Offloader(NoopOffloader):  # type: ignore[misc]
        def _wait_for_layer(self, layer_idx: int) -> None:
            layer.first.weight.data.copy_(torch.ones(8, 8))

    offloader = Offloader()
    register_hooks(layer.far(), offloader)
    check_reads(runner_of(layer), layer.far(), offloader)
    assert layer.first.weight[0, 0] == 1, "it was called"
    assert not vars(offloader)


# Hooks --------------------------------------------------------------------------------


def test_hooks_go_to_what_wraps_the_owner():
    layer = Layer()
    first, second = layer.far()
    wrapper = nn.Module()
    wrapper.base_layer = layer.first
    layer._modules["first"] = wrapper
    assert reader_of(first) is wrapper and reader_of(second) is layer.second
    layer.second = nn.Linear(8, 8)
    with pytest.raises(UnsupportedError, match=r"second was replaced by a Linear"):
        reader_of(second)


def test_the_transformers_backend_is_refused_on_a_gpu():
    """It has all layers in near memory before any is placed."""
    offloader = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    model = nn.Module()
    model.model = nn.Module()
    vars(model)["device_config"] = SimpleNamespace(device=torch.device("cuda"))
    set_offloader(offloader)
    try:
        with pytest.raises(UnsupportedError, match="Transformers backend builds a whole model"):
            loading._init_parameters(lambda *args: None, model, model.model)
        loading._init_parameters(lambda *args: None, model, nn.Linear(8, 8))  # another part
    finally:
        offloader.close()
        set_offloader(None)


def test_models_that_pass_no_layers_are_refused():
    offloader = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    set_offloader(offloader)
    try:
        with pytest.raises(UnsupportedError, match="Linear does not build its layers where"):
            loading.start_streaming(nn.Linear(8, 8))
    finally:
        offloader.close()
        set_offloader(None)
