# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backends whose kernels find KV by a block table and a slot mapping alone."""

import ast
import inspect
import textwrap
from typing import Any

import pytest

from vllm_tiered.adapter.checks import ATTENTION_BACKENDS

OTHER_VALUE_HEADS = {
    "FLASH_ATTN_DIFFKV": "FLASH_ATTN",
    "TRITON_ATTN_DIFFKV": "TRITON_ATTN",
}
"""Backends for values of another head size, with those that they are made from."""


def attributes_of(function: Any, variable: str) -> set[str]:
    """Return the attributes of a variable that a function's source names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == variable
    }


@pytest.mark.parametrize("name", OTHER_VALUE_HEADS)
def test_values_of_another_head_size_are_found_as_by_the_backend_they_extend(name):
    """They need a GPU, so their classes are read: no part of a step has other block numbers."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert {name, OTHER_VALUE_HEADS[name]} <= set(ATTENTION_BACKENDS)
    backend: Any = AttentionBackendEnum[name].get_class()
    base: Any = AttentionBackendEnum[OTHER_VALUE_HEADS[name]].get_class()
    assert issubclass(backend, base) and backend.get_name() == name
    # The metadata is made by the same functions, so it is of the same class.
    builder, base_builder = backend.get_builder_cls(), base.get_builder_cls()
    assert issubclass(builder, base_builder)
    for method in ("build", "build_for_cudagraph_capture", "update_block_table"):
        assert getattr(builder, method, None) is getattr(base_builder, method, None), method
    # The KV update is a call of its own, with the slots alone, before the attention.
    assert not backend.forward_includes_kv_cache_update
    impl, base_impl = backend.get_impl_cls(), base.get_impl_cls()
    update, base_update = impl.do_kv_cache_update, base_impl.do_kv_cache_update
    assert [*inspect.signature(update).parameters] == [*inspect.signature(base_update).parameters]
    # The kernel gets no block numbers but those of the block table.
    read = attributes_of(impl.forward, "attn_metadata")
    assert "block_table" in read and "slot_mapping" not in read
    assert read <= attributes_of(base_impl.forward, "attn_metadata")
    # A block is a page: both take blocks of the same sizes.
    sizes = (of.get_supported_kernel_block_sizes.__qualname__ for of in (backend, base))
    assert len(set(sizes)) == 1
