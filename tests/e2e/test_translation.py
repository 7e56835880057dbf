# SPDX-License-Identifier: Apache-2.0
"""A translation kept from the step before equals a fresh one."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tiered.adapter.kv.device_translation import DeviceTable, DeviceTranslator
from vllm_tiered.adapter.kv.translation import Translator
from vllm_tiered.kernels.kv_pages import reference

NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
BLOCK_TOKENS = 4
NUM_BLOCKS = 40


@dataclass
class Metadata:
    """Fake of vLLM's attention metadata: translation only copies its attributes."""

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_seq_len: int
    seq_lens: list[int]


@dataclass
class OtherMetadata(Metadata):
    """Fake of the metadata of layers that differ from the others of their group."""

    window: int


class Batch:
    """Decoding requests whose persistent tensors are written in place, as vLLM does."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lengths = [rng.randint(1, 12) for _ in range(5)]
        self._table = torch.zeros((8, 10), dtype=torch.int32)
        self._slots = torch.zeros(16, dtype=torch.int64)

    def step(self, *, shuffle: bool, padding: int) -> Any:
        if shuffle:
            blocks = self._rng.sample(range(NUM_BLOCKS), 8 * 5)
            self._table[:, :5] = torch.tensor(blocks).view(8, 5)
            self._lengths = [self._rng.randint(1, 12) for _ in range(self._rng.randint(1, 7))]
        self._lengths = [length + 1 for length in self._lengths]
        number = len(self._lengths)
        for row, length in enumerate(self._lengths):
            block, offset = divmod(length - 1, BLOCK_TOKENS)
            self._slots[row] = self._table[row, block] * BLOCK_TOKENS + offset
        self._slots[number : number + padding] = -1
        metadata = Metadata(
            block_table=self._table[:number],
            slot_mapping=self._slots[:number],
            max_seq_len=max(self._lengths),
            seq_lens=list(self._lengths),
        )
        return SimpleNamespace(
            attn_metadata=dict.fromkeys(NAMES, metadata),
            slot_mapping=dict.fromkeys(NAMES, self._slots[: number + padding]),
        )

    @property
    def fills_a_block(self) -> bool:
        return any(length % BLOCK_TOKENS == 0 for length in self._lengths)


def plain(context: Any) -> list[Any]:
    """Return the tables that the kernels of each layer read."""
    return [
        (
            metadata.block_table.tolist(),
            metadata.slot_mapping.tolist(),
            metadata.seq_lens,
            context.slot_mapping[name].tolist(),
        )
        for name, metadata in context.attn_metadata.items()
    ]


def on_device(pages: np.ndarray[Any, np.dtype[np.int32]]) -> DeviceTranslator:
    """Return a translator that uses the kernel's reference on the CPU."""
    cpu = torch.device("cpu")
    return DeviceTranslator(pages, NAMES, BLOCK_TOKENS, cpu, reference.translate)


def on_host(pages: np.ndarray[Any, np.dtype[np.int32]]) -> Translator:
    return Translator(pages, NAMES, BLOCK_TOKENS)


@pytest.mark.parametrize("make", [on_host, on_device])
@pytest.mark.parametrize("seed", range(10))
def test_kept_is_as_good_as_fresh(seed, make):
    rng = random.Random(seed)
    pages = np.random.default_rng(seed).permutation(3 * NUM_BLOCKS).reshape(3, -1).astype(np.int32)
    kept = make(pages)
    batch = Batch(rng)
    num_kept = 0
    for at in range(60):
        begins_blocks = batch.fills_a_block
        shuffle = at == 0 or rng.random() < 0.1 or max(batch._lengths) > 16
        context = batch.step(shuffle=shuffle, padding=rng.choice((0, 0, 2)))
        keeps_pages = not shuffle and not begins_blocks
        if not keeps_pages:
            pages[:] = np.roll(pages, rng.randint(1, 9), axis=1)  # the table changes in place
        num_kept += keeps_pages
        fresh = SimpleNamespace(**vars(context))
        on_host(pages).translate(fresh)
        shared = context.attn_metadata[NAMES[0]]
        before = (shared.block_table.clone(), shared.slot_mapping.clone())
        kept.translate(context, keeps_pages=keeps_pages)
        assert plain(context) == plain(fresh)
        assert torch.equal(shared.block_table, before[0])
        assert torch.equal(shared.slot_mapping, before[1])
    assert num_kept > 5


def test_addresses_stay_while_the_buffer_is_large_enough():
    """A captured CUDA graph may hold the addresses."""
    rng = random.Random(0)
    pages = np.arange(3 * NUM_BLOCKS, dtype=np.int32).reshape(3, -1)
    translator, batch = on_device(pages), Batch(rng)
    seen = set()
    for at in range(40):
        context = batch.step(shuffle=at % 10 == 0, padding=0)
        translator.translate(context)
        last = context.attn_metadata[NAMES[-1]]
        seen.add((last.block_table.data_ptr(), last.slot_mapping.data_ptr()))
    assert len(seen) <= 3  # 1 to 7 requests of 1 to 6 blocks: the buffers grow a few times


@pytest.mark.parametrize("make", [on_host, on_device])
def test_layers_with_metadata_of_their_own_keep_it(make):
    """As vLLM's layers of one group do that differ in backend, window or query heads."""
    rng = random.Random(3)
    pages = np.random.default_rng(3).permutation(3 * NUM_BLOCKS).reshape(3, -1).astype(np.int32)
    apart, together, batch = make(pages), on_host(pages), Batch(rng)
    for at in range(12):
        context = batch.step(shuffle=at % 4 == 0, padding=0)
        want = SimpleNamespace(**vars(context))
        together.translate(want)
        shared = context.attn_metadata[NAMES[0]]
        other = OtherMetadata(**vars(shared) | {"window": at})
        context.attn_metadata = context.attn_metadata | {NAMES[1]: other}
        apart.translate(context, keeps_pages=at % 4 == 3)
        assert plain(context) == plain(want)
        kinds = [type(meta).__mro__[1] for meta in context.attn_metadata.values()]
        assert kinds == [Metadata, OtherMetadata, Metadata]
        assert context.attn_metadata[NAMES[1]].window == at
        assert not hasattr(context.attn_metadata[NAMES[2]], "window")


@pytest.mark.parametrize("make", [on_host, on_device])
def test_a_layer_without_a_cache_of_its_own_reads_its_targets_pages(make):
    """With its own metadata if it differs from its target's, and with the target's otherwise."""
    pages = np.random.default_rng(4).permutation(3 * NUM_BLOCKS).reshape(3, -1).astype(np.int32)
    translator, batch = make(pages), Batch(random.Random(4))
    translator.share({"alike": NAMES[1], "different": NAMES[2], "elsewhere": "another group"})
    for at in range(6):
        context = batch.step(shuffle=at % 3 == 0, padding=2)
        shared, slots = context.attn_metadata[NAMES[0]], context.slot_mapping[NAMES[0]]
        different = OtherMetadata(**vars(shared) | {"window": at})
        context.attn_metadata |= {"alike": shared, "different": different}
        context.slot_mapping |= dict.fromkeys(("alike", "different"), slots)
        translator.translate(context)
        tables = {name: meta.block_table for name, meta in context.attn_metadata.items()}
        assert torch.equal(tables["alike"], tables[NAMES[1]])
        assert torch.equal(tables["different"], tables[NAMES[2]])
        assert not torch.equal(tables["alike"], tables["different"])
        for name, target in (("alike", NAMES[1]), ("different", NAMES[2])):
            assert torch.equal(context.slot_mapping[name], context.slot_mapping[target])
        assert context.attn_metadata["different"].window == at
        assert not hasattr(context.attn_metadata["alike"], "window")
        assert context.attn_metadata.keys() == {*NAMES, "alike", "different"}


def test_a_page_that_moved_is_followed_at_once():
    pages = np.zeros((3, NUM_BLOCKS), dtype=np.int32)
    translator, batch = on_device(pages), Batch(random.Random(0))
    for at in range(5):
        pages[:] = at + 1
        context = batch.step(shuffle=True, padding=0)
        translator.translate(context)
        assert all((meta.block_table == at + 1).all() for meta in context.attn_metadata.values())


class LateDevice:
    """Fake device whose copies run when their event is awaited, with what the host then holds."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self._under_way: list[torch.Tensor] = []

    def copy_(self, host: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._under_way.append(host)

    def deliver(self, count: int) -> None:
        while len(self.arrived) < count:
            self.arrived.append(int(self._under_way[len(self.arrived)][0]))

    def make_event(self) -> Any:
        recorded = 0

        def record() -> None:
            nonlocal recorded
            recorded = len(self._under_way)

        return SimpleNamespace(record=record, synchronize=lambda: self.deliver(recorded))


def test_a_delayed_table_arrives_as_it_was_when_it_was_sent(monkeypatch):
    source, late = np.zeros(4, dtype=np.int32), LateDevice()
    table = DeviceTable(source, torch.device("cpu"), late.make_event)
    monkeypatch.setattr(table, "on_device", late)
    for at in range(6):
        source[:] = at
        table.upload()
    late.deliver(6)
    assert late.arrived == list(range(6))


class LatentBatch(Batch):
    """The same requests, the first of them as decodes, in vLLM's metadata of latent attention."""

    def step(self, *, shuffle: bool, padding: int) -> Any:
        from vllm.model_executor.layers.attention.mla_attention import (
            MLACommonDecodeMetadata,
            MLACommonMetadata,
            MLACommonPrefillMetadata,
        )

        context = super().step(shuffle=shuffle, padding=padding)
        flat = context.attn_metadata[NAMES[0]]
        number = len(flat.seq_lens)
        num_decodes = self._rng.randint(0, number)
        starts = torch.arange(number + 1, dtype=torch.int32)
        prefill = MLACommonPrefillMetadata(flat.block_table[num_decodes:], starts, max_query_len=1)
        decode = MLACommonDecodeMetadata(
            flat.block_table[:num_decodes], torch.tensor(flat.seq_lens), None
        )
        metadata: Any = MLACommonMetadata(
            num_reqs=number,
            max_query_len=1,
            max_seq_len=flat.max_seq_len,
            num_actual_tokens=number,
            query_start_loc=starts,
            slot_mapping=flat.slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_prefills=number - num_decodes,
            prefill=prefill if num_decodes < number else None,
            decode=decode if num_decodes else None,
        )
        context.attn_metadata = dict.fromkeys(NAMES, metadata)
        return context


@pytest.mark.parametrize("make", [on_host, on_device])
@pytest.mark.parametrize("seed", range(3))
def test_latent_attention_has_a_table_for_prefills_and_one_for_decodes(seed, make):
    rng = random.Random(seed)
    pages = np.array([rng.sample(range(100), NUM_BLOCKS) for _ in NAMES], dtype=np.int32)
    translator = make(pages)
    batch, kinds = LatentBatch(rng), set()
    for number in range(60):
        context = batch.step(shuffle=number % 3 == 0, padding=rng.randint(0, 3))
        shared = context.attn_metadata[NAMES[0]]
        columns = -(-shared.max_seq_len // BLOCK_TOKENS)
        tables = {
            part: getattr(shared, part).block_table.numpy()[:, :columns].copy()
            for part in ("prefill", "decode")
            if getattr(shared, part) is not None
        }
        slots = shared.slot_mapping.numpy().copy()
        kinds.add(tuple(tables))
        translator.translate(context, keeps_pages=number % 3 == 1)
        for layer, name in enumerate(NAMES):
            own = context.attn_metadata[name]
            assert isinstance(own, type(shared)) and own.num_decodes == shared.num_decodes
            for part in ("prefill", "decode"):
                assert (getattr(own, part) is None) == (part not in tables)
            for part, blocks in tables.items():
                found = getattr(own, part)
                assert np.array_equal(found.block_table.numpy(), pages[layer][blocks])
                assert isinstance(found, type(getattr(shared, part)))
            moved = pages[layer][slots // BLOCK_TOKENS] * BLOCK_TOKENS + slots % BLOCK_TOKENS
            assert np.array_equal(own.slot_mapping.numpy(), moved)
            assert np.array_equal(context.slot_mapping[name].numpy()[: len(slots)], moved)
    assert len(kinds) == 3
