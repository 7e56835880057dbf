# SPDX-License-Identifier: Apache-2.0
"""Obstacles to KV swapping that no model of the engine tests has, in vLLM's own terms."""

from types import SimpleNamespace

import pytest
import torch

from vllm_tiered.adapter.kv import groups as groups_of
from vllm_tiered.adapter.kv import obstacles
from vllm_tiered.adapter.kv.block_sizes import find_split_blocks
from vllm_tiered.adapter.kv.steps import StepReport


def full_attention(block_tokens=64, num_kv_heads=2):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=num_kv_heads, head_size=64, dtype=torch.bfloat16
    )


def backend(*block_tokens):
    """Return a backend whose kernel takes blocks of these sizes alone."""
    return SimpleNamespace(
        get_name=lambda: "TRITON_ATTN",
        get_supported_kernel_block_sizes=lambda spec=None: list(block_tokens),
    )


def test_kernels_that_split_blocks():
    def obstacle(*block_tokens):
        layers = [(backend(*block_tokens), spec)]
        return find_split_blocks(layers, spec.page_size_bytes)

    spec = full_attention(block_tokens=64)
    assert "splits blocks of 64 tokens: set --block-size 16" in obstacle(16)
    assert obstacle(16, 64) is None
    assert obstacle(48) is None, "vLLM refuses that itself"


def test_kernels_that_split_blocks_which_vllm_makes_larger():
    """A layer with half the KV heads gets blocks of twice the tokens."""
    half, whole = full_attention(), full_attention(num_kv_heads=4)

    def obstacle(*block_tokens):
        layers = [(backend(*block_tokens), half), (backend(*block_tokens), whole)]
        return find_split_blocks(layers, whole.page_size_bytes)

    assert "splits blocks of 128 tokens: set --block-size 32" in obstacle(64)
    assert obstacle(64, 128) is None
    padded = full_attention(num_kv_heads=3)
    assert find_split_blocks([(backend(64), padded)], whole.page_size_bytes) is None


def test_layers_of_two_sizes():
    one, two = full_attention(), full_attention(num_kv_heads=4)
    assert obstacles.find_spec_obstacle([one, one]) is None
    assert "KV caches of one size" in (obstacles.find_spec_obstacle([one, two]) or "")


def test_plans_whose_pages_do_not_follow_one_another():
    from vllm.v1.kv_cache_interface import MambaSpec

    def plan(block_stride, num_tensors=1, *, is_mixed=False, others=()):
        tensors = [SimpleNamespace(block_stride=block_stride)] * num_tensors
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=[*own_specs])
        return [
            SimpleNamespace(
                kv_cache_groups=[group, *others],
                kv_cache_tensors=tensors,
                has_mixed_precision_kv_cache=is_mixed,
            )
        ]

    def obstacle(configs, own=None):
        own_by_name = dict.fromkeys(own_specs, own or spec)
        return obstacles.find_plan_obstacle(configs, [own_by_name]) or ""

    own_specs = ["layers.0"]
    spec = full_attention()
    page_bytes = spec.page_size_bytes
    assert not obstacle(plan(page_bytes))
    apart = obstacle(plan(4 * page_bytes))
    assert f"pages of {page_bytes} bytes lie {4 * page_bytes} bytes apart" in apart
    assert "in 2 allocations" in obstacle(plan(page_bytes, 2))
    assert "in another precision" in obstacle(plan(page_bytes, is_mixed=True))
    smaller = full_attention(block_tokens=32)
    assert not obstacle(plan(page_bytes), own=smaller)
    state = MambaSpec(block_size=64, shapes=((page_bytes // 4,),), dtypes=(torch.float32,))
    states = [SimpleNamespace(kv_cache_spec=state, layer_names=["layers.1"])]
    beside_states = plan(page_bytes, 2, others=states)
    assert "the size of a recurrent state" in obstacle(beside_states, own=smaller)
    for names in (["attn"], ["layers.6.dpa.0"], ["layers.1.a", "layers.1.b"]):
        own_specs[:] = names
        assert f"from their names ({names[-1]})" in obstacle(plan(page_bytes))


def test_one_rank_that_cannot_is_enough():
    able, unable = StepReport(), StepReport(why_not="fused")
    assert able.aggregate(unable).why_not == unable.aggregate(able).why_not == "fused"
    assert able.followed_by(unable).why_not == "fused"


@pytest.mark.parametrize("is_v2", [False, True])
def test_recurrent_states_under_model_runner_v2(is_v2):
    """Both runners swap the layers of full attention beside them."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import MambaSpec

    class Layer(AttentionLayerBase):  # type: ignore[misc]  # vLLM is not typed
        def __init__(self, spec):
            self.spec = spec

        def get_kv_cache_spec(self, vllm_config):
            return self.spec

        def get_attn_backend(self):
            return backend(64)

    state = MambaSpec(block_size=64, shapes=((4, 8),), dtypes=(torch.float32,))
    layers = {"layers.0": Layer(state), "layers.1": Layer(full_attention())}
    vllm_config = SimpleNamespace(
        use_v2_model_runner=is_v2,
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    assert obstacles.find_model_obstacle(vllm_config, is_loaded=False) is None


@pytest.mark.parametrize(
    ("method", "is_v2", "reason"),
    [
        ("ngram", True, None),
        ("ngram_gpu", True, None),
        ("eagle3", False, None),
        ("eagle3", True, "CUDA graphs of its own"),
        ("mtp", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("dflash", False, "outside the draft model's steps"),
        ("custom_class", False, "outside the draft model's steps"),
    ],
)
def test_draft_models_under_model_runner_v2(method, is_v2, reason):
    vllm_config = SimpleNamespace(
        use_v2_model_runner=is_v2, speculative_config=SimpleNamespace(method=method)
    )
    obstacle = obstacles._find_draft_obstacle(vllm_config, [full_attention()])
    assert (obstacle is None) == (reason is None)
    assert (reason or "") in (obstacle or "")


def test_a_draft_models_layers_in_another_group():
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(
        block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=128
    )
    groups = [
        SimpleNamespace(kv_cache_spec=full_attention(), layer_names=["layers.0", "draft.0"]),
        SimpleNamespace(kv_cache_spec=window, layer_names=["layers.1", "draft.layers.0.window"]),
    ]
    assert groups_of.find_group_obstacle(groups, {"draft.0"}) is None
    obstacle = groups_of.find_group_obstacle(groups, {"draft.0", "draft.layers.0.window"}) or ""
    assert "not of the model's kind (draft.layers.0.window)" in obstacle


def test_a_drafter_that_does_not_name_its_layers():
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    class Drafter(SpecDecodeBaseProposer):  # type: ignore[misc]  # vLLM is not typed
        def __init__(self):
            pass

    drafter = Drafter()
    assert obstacles._draft_layers(drafter) is None
    drafter._draft_attn_layer_names = {"draft.0"}
    assert obstacles._draft_layers(drafter) == {"draft.0"}
    assert not obstacles._draft_layers(None)
