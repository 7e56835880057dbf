# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered prepare` on checkpoints that transformers wrote: every family, every neuron."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_tiered.cli import prepare as cli_prepare
from vllm_tiered.cli.main import main
from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.matmul.quantise import expand
from vllm_tiered.ffn.prepare import pipeline, texts
from vllm_tiered.ffn.prepare.checkpoint import Checkpoint
from vllm_tiered.ffn.store import layer as store_layer
from vllm_tiered.ffn.store.reader import NeuronStore, check_store
from vllm_tiered.ffn.store.writer import NeuronStoreWriter
from vllm_tiered.storage.direct_file import aligned_pages

HIDDEN, NEURONS, LAYERS = 128, 96, 3
GATED = dict(
    hidden_size=HIDDEN, intermediate_size=NEURONS, num_hidden_layers=LAYERS, hidden_act="relu"
)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**GATED, **HEADS}),
    "mistral": ("MistralConfig", {**GATED, **HEADS}),
    "qwen2": ("Qwen2Config", {**GATED, **HEADS}),
    "qwen3": ("Qwen3Config", {**GATED, **HEADS, "head_dim": 32}),
    "phi3": ("Phi3Config", {**GATED, **HEADS, "pad_token_id": 0}),
    "opt": (
        "OPTConfig",
        dict(
            hidden_size=HIDDEN,
            ffn_dim=NEURONS,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            vocab_size=64,
            word_embed_proj_dim=HIDDEN,
        ),
    ),
}


def write_model(folder, family, *, headless=False):
    """A tiny checkpoint as transformers saves it; returns the model."""
    import transformers

    name, arguments = CONFIGS[family]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**arguments)
    kind = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    model = kind.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, which start as zeros
            parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of each family's checkpoint, made once."""
    root = tmp_path_factory.mktemp("models")
    for family in CONFIGS:
        write_model(root / family, family)
    return root


@pytest.fixture
def llama(models, tmp_path):
    shutil.copytree(models / "llama", tmp_path / "model")
    return tmp_path / "model"


_calibration = cli_prepare._calibration


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch):
    """These models have no tokenizer; calibration has tests of its own."""
    monkeypatch.setattr(cli_prepare, "_calibration", lambda args: None)


def prepare(model, out, *options):
    return main(["prepare", str(model), "--out", str(out), *options])


def read_layer(store, layer, precision):
    neurons = np.arange(store.shape.neurons)
    stride = bundle_stride(store.shape, precision)
    into = aligned_pages(len(neurons), stride, torch.device("cpu"))
    store.read(layer, precision, neurons, into, neurons)
    return expand(into, store.scales(layer, precision), store.shape, precision, store.dtype)


def ffn_of(model, family, layer):
    """Return the FFN of transformers, which is the reference for the store's neurons."""
    parts = dict(model.named_modules())
    return parts[f"{'model.decoder.layers' if family == 'opt' else 'model.layers'}.{layer}"]


def dense(module, family, x):
    if family == "opt":
        return module.fc2(module.activation_fn(module.fc1(x)))
    return module.mlp(x)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_stored_neurons_compute_what_the_model_does(family, models, tmp_path):
    from transformers import AutoModelForCausalLM

    assert prepare(models / family, tmp_path / "store") == 0
    model = AutoModelForCausalLM.from_pretrained(models / family, dtype=torch.float32)
    with NeuronStore.open(tmp_path / "store", Checkpoint(models / family).fingerprint) as store:
        assert store.activation == "relu"
        for layer in range(LAYERS):
            x_BH = torch.randn(5, HIDDEN)
            expected_BH = dense(ffn_of(model, family, layer), family, x_BH)
            w_NMH = read_layer(store, layer, Precision.FULL)
            up_BN = x_BH @ w_NMH[:, -2].T
            bias_N, bias_H = store.up_bias(layer), store.down_bias(layer)
            up_BN = up_BN if bias_N is None else up_BN + bias_N
            a_BN = (x_BH @ w_NMH[:, 0].T).relu() * up_BN if store.shape.gated else up_BN.relu()
            out_BH = a_BN @ w_NMH[:, -1]
            out_BH = out_BH if bias_H is None else out_BH + bias_H
            torch.testing.assert_close(out_BH, expected_BH, atol=1e-5, rtol=1e-5)
        has_bias = family == "opt"
        assert (store.up_bias(0) is not None) == has_bias == (store.down_bias(0) is not None)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_a_checkpoint_without_a_head_has_shorter_names(family, tmp_path):
    write_model(tmp_path / "model", family, headless=True)
    assert Checkpoint(tmp_path / "model").layer(1).rows_NMH.shape[0] == NEURONS


def test_the_dtype_is_the_checkpoints_or_as_given(llama, tmp_path):
    assert prepare(llama, tmp_path / "a") == 0
    options = ("--dtype", "bfloat16", "--precisions", "full,int8", "--predictor", "none")
    assert prepare(llama, tmp_path / "b", *options) == 0
    with NeuronStore.open(tmp_path / "a") as a, NeuronStore.open(tmp_path / "b") as b:
        assert (a.dtype, b.dtype) == (torch.float32, torch.bfloat16)
        assert b.precisions == (Precision.FULL, Precision.INT8)
        assert b.contents["notes"] == {"predictor": "none"}
        full = read_layer(a, 2, Precision.FULL)
        assert torch.equal(read_layer(b, 2, Precision.FULL), full.bfloat16())


@pytest.mark.parametrize(
    ("option", "group"), [((), 64), (("--group", "32"), 32), (("--group", "0"), None)]
)
def test_groups_are_as_asked_for(option, group, llama, tmp_path):
    assert prepare(llama, tmp_path / "store", *option) == 0
    with NeuronStore.open(tmp_path / "store") as store:
        assert store.group == {Precision.FULL: None, Precision.INT8: group, Precision.INT4: group}
        assert store.scales(0, Precision.INT4).shape[2] == (HIDDEN // group if group else 1)


def test_what_is_prepared_is_not_prepared_again(llama, tmp_path, capsys):
    store = tmp_path / "store"
    assert prepare(llama, store) == 0
    said = capsys.readouterr().out
    assert "of neurons in full,int8,int4" in said
    assert "Near memory: the dense FFN needs" in said and "; the neurons need" in said
    assert "the sparse FFN will step aside: the neurons need" in said
    before = (store / "store.json").stat().st_mtime_ns
    assert prepare(llama, store) == 0
    assert "already has this model with these settings" in capsys.readouterr().out
    assert prepare(llama, store, "--group", "32") == 1
    assert "exists already: remove it" in capsys.readouterr().err
    assert (store / "store.json").stat().st_mtime_ns == before


KILLED = """
import os, signal, sys
from vllm_tiered.cli.main import main
from vllm_tiered.ffn.prepare import pipeline
real = pipeline.write_layer
def write_layer(draft, form, layer, *rest):
    if layer == int(sys.argv[3]):
        fd = os.open(draft / "neurons.bin", os.O_RDWR)
        os.pwrite(fd, b"half written", form.offset(layer, form.precisions[0]))
        os.kill(os.getpid(), signal.SIGKILL)
    real(draft, form, layer, *rest)
pipeline.write_layer = write_layer
import vllm_tiered.cli.prepare
vllm_tiered.cli.prepare._calibration = lambda args: None
main(["prepare", sys.argv[1], "--out", sys.argv[2]])
"""


@pytest.mark.parametrize("layer", range(LAYERS))
def test_killed_and_resumed_it_is_the_same_to_the_byte(layer, llama, tmp_path, capsys):
    assert prepare(llama, tmp_path / "whole") == 0
    out = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(llama), str(out), str(layer)], timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    draft = tmp_path / "killed.draft"
    finished = [draft / f"layer-{n}.safetensors" for n in range(layer)]
    assert sorted(draft.glob("layer-*")) == finished
    assert prepare(llama, out) == 0
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(out.iterdir())) == 3 + LAYERS and not draft.exists()


def test_finished_layers_are_not_done_again(llama, tmp_path, monkeypatch):
    real, layers = store_layer.write_layer, []

    def interrupted(draft, form, layer, *rest):
        if layer == 2 and 2 not in layers:
            layers.append(layer)
            raise KeyboardInterrupt
        layers.append(layer)
        real(draft, form, layer, *rest)

    monkeypatch.setattr(pipeline, "write_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(llama, tmp_path / "store")
    assert prepare(llama, tmp_path / "store") == 0
    assert layers == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no calibration text: give --calibration FILE, or install conversations"),
        (("--calibration", "none.txt"), "none.txt: there is no such file"),
        (("--predictor", "low_rank"), "no calibration text"),
    ],
)
def test_a_calibration_text_is_looked_for_before_anything_is_written(
    options, message, llama, tmp_path, monkeypatch, capsys
):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli_prepare, "_calibration", _calibration)
    monkeypatch.setattr(texts, "distribution", missing)
    assert prepare(llama, tmp_path / "store", *options) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("store*"))
    assert prepare(llama, tmp_path / "store", "--predictor", "none") == 0


def test_predictors_of_an_interrupted_call_are_not_anothers(llama, tmp_path, monkeypatch):
    publish = NeuronStoreWriter.publish
    monkeypatch.setattr(NeuronStoreWriter, "publish", lambda *_: pytest.fail("it was killed"))
    with pytest.raises(pytest.fail.Exception):
        prepare(llama, tmp_path / "store")
    assert list((tmp_path / "store.draft").glob("gate-*"))
    monkeypatch.setattr(NeuronStoreWriter, "publish", publish)
    assert prepare(llama, tmp_path / "store", "--predictor", "none") == 0
    assert not list((tmp_path / "store").glob("gate-*"))
    with pytest.raises(ConfigError, match="no predictors: remove it and prepare the model again"):
        check_store(tmp_path / "store", needs_predictors=True)
    check_store(tmp_path / "store")


# Refusals -------------------------------------------------------------------------------


def edit(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_tensors(folder, change):
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def replace_header(folder, header):
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json: give a local folder"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "is no model's configuration"),
        (lambda f: edit(f, model_type="mixtral"), "model_type 'mixtral' is not known"),
        (lambda f: edit(f, quantization_config={"bits": 4}), "is quantised"),
        (lambda f: edit(f, hidden_act="mish"), "hidden_act is 'mish'"),
        (lambda f: edit(f, hidden_act="silu"), "hidden_act is 'silu'. A neuron store is for relu"),
        (lambda f: edit(f, hidden_act="fatrelu"), "hidden_act_param is None, not a threshold"),
        (lambda f: edit(f, hidden_act="fatrelu", hidden_act_param=-1), "is -1, not a threshold"),
        (lambda f: edit(f, intermediate_size=None), "intermediate_size is None"),
        (lambda f: edit(f, intermediate_size=97), "they are not of one model"),
        (lambda f: edit(f, num_hidden_layers=4), "lacks model.layers.3.mlp.gate_proj.weight"),
        (lambda f: change_tensors(f, lambda t: t.pop(DOWN)), f"lacks {DOWN}"),
        (
            lambda f: change_tensors(f, lambda t: t.pop(DOWN.replace("1", "0"))),
            "an FFN of this kind (no mixture of experts",
        ),
        (
            lambda f: change_tensors(f, lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})),
            f"{DOWN} is I8",
        ),
        (
            lambda f: change_tensors(
                f, lambda t: t.update({"model.layers.0.mlp.gate_proj.bias": torch.ones(NEURONS)})
            ),
            "gated FFNs with biases are not supported",
        ),
        (
            lambda f: change_tensors(f, lambda t: t[DOWN].fill_(torch.nan)),
            "not finite, or beyond what a scale",
        ),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors")], "has no *.safetensors"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "gone.safetensors"}})
            ),
            "lacks 1 of its 1 files of weights (gone.safetensors)",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("[1]"), "is damaged"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[" * 10**5), "is damaged"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
            "is damaged",
        ),
        (lambda f: (f / "config.json").write_text('{"a": ' * 10**5), "more than 64 tables"),
        (lambda f: replace_header(f, b"[" * 10**5), "model.safetensors is damaged"),
        (
            lambda f: replace_header(
                f, b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": "ab"}}'
            ),
            "model.safetensors is damaged",
        ),
        (
            lambda f: os.truncate(f / "model.safetensors", 100_000),
            "model.safetensors is damaged or cut off",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 4), "is damaged or cut off"),
    ],
)
def test_a_checkpoint_that_cannot_be_prepared(spoil, message, llama, tmp_path, capsys):
    spoil(llama)
    assert prepare(llama, tmp_path / "store") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--precisions", "full,int2"), "'int2' is none of full,int8,int4"),
        (("--group", "60"), "--group 60: rows of 128 weights are not made of such groups"),
    ],
)
def test_options_that_cannot_be(options, message, llama, tmp_path, capsys):
    assert prepare(llama, tmp_path / "store", *options) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("store*"))


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert prepare(tmp_path / "nothing", tmp_path / "store") == 1
    assert "has no config.json" in capsys.readouterr().err


def test_without_ray_it_says_so(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert prepare(llama, tmp_path / "store", "--ray") == 1
    assert "Ray is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_with_ray_the_store_is_the_same(llama, tmp_path):
    pytest.importorskip("ray")
    assert prepare(llama, tmp_path / "here") == 0
    assert prepare(llama, tmp_path / "ray", "--ray") == 0
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "ray" / path.name).read_bytes() == path.read_bytes()


MEASURED = """
import re, sys
from pathlib import Path
from vllm_tiered.cli.main import main
import vllm_tiered.ffn.prepare.pipeline
def kib(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here, not in who started this
before = kib("VmRSS")
options = ["--precisions", "full,int8", "--predictor", "none"]
assert main(["prepare", sys.argv[1], "--out", sys.argv[2], *options]) == 0
print(kib("VmHWM") - before)
"""


def test_it_takes_the_memory_of_a_layer_not_of_the_model(tmp_path):
    """16 layers of 24 MiB in float32; a layer, its largest matrix, and what rounding takes.

    122 MiB were seen; the bound leaves a layer to what the allocator keeps."""
    hidden, neurons, layers = 1024, 2048, 16
    folder = tmp_path / "model"
    folder.mkdir()
    shapes = {
        "gate_proj": (neurons, hidden),
        "up_proj": (neurons, hidden),
        "down_proj": (hidden, neurons),
    }
    tensors = {
        f"model.layers.{layer}.mlp.{name}.weight": torch.randn(shape) / 30
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    layer_mib = 3 * neurons * hidden * 4 >> 20
    config = dict(model_type="llama", hidden_size=hidden, intermediate_size=neurons)
    config |= dict(num_hidden_layers=layers, hidden_act="relu")
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    grown_mib = int(done.stdout.split()[-1]) >> 10
    assert grown_mib < 6 * layer_mib < layers * layer_mib / 2, grown_mib


def test_the_draft_is_one_processes_alone(llama, tmp_path, capsys):
    """A second process starts while the first one works."""
    waiting = """
import sys, time
from vllm_tiered.cli.main import main
from vllm_tiered.ffn.prepare import pipeline
import vllm_tiered.cli.prepare
vllm_tiered.cli.prepare._calibration = lambda args: None
pipeline.write_layer = lambda *rest: (print("begun", flush=True), time.sleep(600))
main(["prepare", sys.argv[1], "--out", sys.argv[2]])
"""
    out = tmp_path / "store"
    first = subprocess.Popen(
        [sys.executable, "-c", waiting, str(llama), str(out)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None and "begun" in first.stdout.readline()
    try:
        assert prepare(llama, out) == 1
        assert "is being written by another process" in capsys.readouterr().err
    finally:
        first.kill()
        first.communicate()
    assert prepare(llama, out) == 0
