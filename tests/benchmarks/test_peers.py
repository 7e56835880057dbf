# SPDX-License-Identifier: Apache-2.0
"""The peers' table, command lines and answers, and the share of the weights they keep."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.peers import accelerate_disk, checkpoint, contender, flexgen, llama_cpp
from benchmarks.peers.model import write_model
from benchmarks.peers.shapes import (
    INT4_SHAPES,
    SHAPES,
    LlamaInt4Shape,
    OlmoeShape,
    OptShape,
    outside_layers_bytes,
)

TINY = OptShape(hidden_size=64, ffn_dim=160, num_layers=3, num_heads=4, vocab_size=80)

RUN = peers.PeerRun(
    peer="flexgen",
    version="0.1.8",
    load_seconds=1.5,
    prefill_seconds=2.0,
    seconds_per_token=(0.5, 1.5),
    batch=2,
    model_bytes=1000,
    resident_bytes=250,
)


def installed_for(peer, without=()):
    """Return the versions of an environment with everything that a contender needs."""
    everything = {name: peer.versions.get(name, "1.0") for name in peer.packages}
    return {name: version for name, version in everything.items() if name not in without}


@pytest.fixture
def environment(tmp_path):
    """Return the interpreter of an environment that has the program."""
    (tmp_path / "bin").mkdir()
    for name in ("python", peers.LLAMA_BENCH):
        (tmp_path / "bin" / name).write_text("")
    return str(tmp_path / "bin" / "python")


@pytest.mark.parametrize("peer", peers.PEERS.values(), ids=lambda peer: peer.name)
def test_a_complete_environment_lacks_nothing(peer, environment):
    assert peers.missing(peer, environment, installed_for(peer)) is None


@pytest.mark.parametrize(
    ("peer", "package"),
    [(peer, package) for peer in peers.PEERS.values() for package in peer.packages],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(peer, package, environment):
    lacking = peers.missing(peer, environment, installed_for(peer, without=[package]))
    install = f"{environment} -m pip install {peer.packages[package]}"
    assert lacking == f"package {package}: {install}"


def test_a_package_that_is_patched_is_wanted_in_its_version(environment):
    peer = peers.PEERS["flexgen"]
    versions = {**installed_for(peer), "flexgen": "0.2.0"}
    lacking = peers.missing(peer, environment, versions)
    assert lacking is not None
    assert lacking.startswith("package flexgen is 0.2.0, not 0.1.8: ")


def test_an_absent_program_is_named_with_the_script_that_builds_it(environment):
    peer = peers.PEERS["llama_cpp"]
    (Path(environment).parent / peers.LLAMA_BENCH).unlink()
    lacking = peers.missing(peer, environment, installed_for(peer))
    folder = Path(environment).parent.parent
    assert lacking == f"program llama_bench: benchmarks/peers/build_llama_cpp.sh {folder}"
    assert (Path(peers.__file__).parent / "build_llama_cpp.sh").is_file()


@pytest.mark.parametrize("python", ["", "/no/such/python"])
def test_without_an_interpreter_no_contender_is_available(python):
    answers = peers.available(python)
    assert set(answers) == set(peers.PEERS)
    assert all(answer and "python -m venv" in answer for answer in answers.values())


def test_an_interpreter_is_asked_for_its_packages():
    answers = peers.available(sys.executable)
    for name in ("flexgen", "airllm_disk"):  # neither is a package of this environment
        answer = answers[name]
        assert answer is not None
        assert "package torch" not in answer
    assert "pip install --no-deps flexgen==0.1.8" in str(answers["flexgen"])


@pytest.mark.parametrize("peer", peers.PEERS)
def test_the_command_line_is_what_the_contenders_read(peer, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    line = peers.command(
        peer,
        "python",
        model=tmp_path,
        work=tmp_path / "work",
        threads=2,
        prompt_tokens=12,
        new_tokens=16,
        resident_share=0.25,
        batch=3,
        prepare=True,
    )
    assert line[:3] == ["python", "-m", f"benchmarks.peers.{peer}"]
    assert (Path(peers.__file__).parent / f"{peer}.py").is_file()
    assert contender.parse_arguments("", line[3:]) == contender.Arguments(
        model=tmp_path,
        work=tmp_path / "work",
        threads=2,
        prompt_tokens=12,
        new_tokens=16,
        resident_share=0.25,
        batch=3,
        random_tokens=False,
        routing="",
        prepare=True,
    )


@pytest.mark.parametrize(
    "option", [("--resident-share", "1.1"), ("--new-tokens", "1"), ("--threads", "0")], ids=str
)
def test_numbers_out_of_range_are_refused(option, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        contender.parse_arguments("", ["--model", str(tmp_path), "--work", str(tmp_path), *option])
    assert f"{option[0]} {option[1]}: expected" in capsys.readouterr().err


def test_a_printed_run_is_read_back():
    text = f"warning: slow\n{RUN.line()}\nPEERS are not it\n"
    assert peers.parse_output(text) == RUN
    assert RUN.tokens_per_s == 2.0


def changed(**values):
    """Return the line of a run with other values; a value of None drops the field."""
    fields = {**json.loads(RUN.line().removeprefix(peers.PREFIX)), **values}
    return peers.PREFIX + json.dumps({key: v for key, v in fields.items() if v != "drop"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 lines begin with"),
        (f"{RUN.line()}\n{RUN.line()}", "2 lines begin with"),
        ("PEER {", "not JSON"),
        ("PEER [1]", r"fields \[1\]"),
        (changed(load_seconds="drop"), "expected .*load_seconds"),
        (changed(extra=1), "fields .*extra"),
        (changed(peer="vllm"), "no contender 'vllm'"),
        (changed(seconds_per_token=[]), "a list with entries"),
        (changed(seconds_per_token=0.5), "a list with entries"),
        (changed(seconds_per_token=[0.5, 0.0]), "seconds_per_token is 0.0"),
        (changed(prefill_seconds=True), "prefill_seconds is True"),
        (changed(load_seconds=float("nan")), "load_seconds is nan"),
        (changed(model_bytes="1000"), "model_bytes is '1000'"),
        (changed(resident_bytes=1001), "resident_bytes is 1001 of 1000"),
        (changed(resident_bytes="250"), "resident_bytes is '250'"),
    ],
)
def test_garbage_is_refused_and_named(text, message):
    with pytest.raises(ValueError, match=message):
        peers.parse_output(text)


def test_system_managed_residency_is_none():
    assert peers.parse_output(changed(resident_bytes=None)).resident_bytes is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(TINY, folder)
    return checkpoint.Checkpoint(folder)


def test_llama_cpp_gets_a_mixtures_experts_in_one_tensor(tmp_path):
    from gguf import GGUFReader

    shape = OlmoeShape(
        hidden_size=64,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_experts=4,
        top_k=2,
        vocab_size=96,
    )
    write_model(shape, tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    model = checkpoint.Checkpoint(tmp_path)
    names = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    stacked = np.stack([model[name] for name in names])
    down = found["blk.1.ffn_down_exps.weight"]
    assert list(down.shape) == [32, 64, 4]  # GGUF's order is the other way round
    np.testing.assert_array_equal(down.data.view("<u2").reshape(stacked.shape), stacked)
    router = found["blk.0.ffn_gate_inp.weight"]
    expected = checkpoint.to_float32(model["model.layers.0.mlp.gate.weight"])
    np.testing.assert_array_equal(router.data, expected)
    assert sum(tensor.n_elements for tensor in found.values()) == shape.num_bytes // 2


def test_llama_cpp_gets_the_same_4_bit_weights(tmp_path):
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import load_file

    from vllm_tiered.experts.int4.packing import expand, from_rows

    shape = INT4_SHAPES["qwen3-small-int4"]
    write_model(shape, tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    tensors: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        tensors |= load_file(path)
    for which, rows, length in (("gate", 128, 256), ("down", 256, 128)):
        experts = [f"model.layers.1.mlp.experts.{e}.{which}_proj.weight" for e in range(16)]
        packed = torch.stack([tensors[f"{expert}_packed"] for expert in experts])
        scales = torch.stack([tensors[f"{expert}_scale"] for expert in experts])
        assert tensors[f"{experts[3]}_shape"].tolist() == [rows, length]
        expected = expand(from_rows(packed, scales, None, zeros_add=0)).numpy()
        stack = found[f"blk.1.ffn_{which}_exps.weight"]
        assert list(stack.shape) == [length, rows, 16]
        weights = dequantize(stack.data, stack.tensor_type).reshape(expected.shape)
        # Their scales are float16, ours are bfloat16; this one is exact in both.
        np.testing.assert_array_equal(weights, expected)
        assert abs(expected.mean()) < 0.01 and 0.03 < expected.std() < 0.05
    matrices = ("_packed", "_scale")
    in_4_bit = sum(t.nbytes for name, t in tensors.items() if name.endswith(matrices))
    assert in_4_bit == 2 * 16 * shape.expert_bytes


def test_llama_cpp_gets_llamas_4_bit_weights_with_the_rows_of_its_graph(tmp_path):
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import load_file

    from vllm_tiered.experts.int4.packing import expand, from_rows

    shape = LlamaInt4Shape(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=80,
        std=2**-4 * 85**0.5 / 2,  # a scale that float16 and bfloat16 have exactly
    )
    write_model(shape, tmp_path)
    llama_cpp.convert(tmp_path, tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    tensors: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        tensors |= load_file(path)
    assert sum(tensor.nbytes for tensor in tensors.values()) == shape.num_bytes
    outside = [t.nbytes for name, t in tensors.items() if ".layers." not in name]
    assert outside_layers_bytes(shape) == sum(outside)
    for theirs, ours, heads in (
        ("attn_q", "self_attn.q_proj", 4),
        ("attn_k", "self_attn.k_proj", 2),
        ("attn_output", "self_attn.o_proj", 0),
        ("ffn_down", "mlp.down_proj", 0),
    ):
        name = f"model.layers.1.{ours}.weight"
        packed, scales = (tensors[f"{name}_{part}"][None] for part in ("packed", "scale"))
        expected = expand(from_rows(packed, scales, None, zeros_add=0))[0].numpy()
        tensor = found[f"blk.1.{theirs}.weight"]
        weights = dequantize(tensor.data, tensor.tensor_type)
        for head in range(heads):  # 16 rows each: the pairs (0, 8), (1, 9) ... are neighbours
            first = expected[16 * head : 16 * head + 8]
            second = expected[16 * head + 8 : 16 * head + 16]
            np.testing.assert_array_equal(weights[16 * head : 16 * head + 16 : 2], first)
            np.testing.assert_array_equal(weights[16 * head + 1 : 16 * head + 16 : 2], second)
        if not heads:
            np.testing.assert_array_equal(weights, expected)


def test_flexgen_keeps_whole_matrices_within_the_share():
    config = SHAPES["opt-6.7b"].config()
    sizes = flexgen.sublayer_sizes(config)
    total = sum(map(sum, sizes))
    embedding = 2 * 50272 * 4096
    assert total == SHAPES["opt-6.7b"].num_bytes + embedding  # counts the tied embedding twice
    assert flexgen.resident_bytes(sizes, 0) == 0
    assert flexgen.resident_bytes(sizes, 100) == total
    # 30 %: the output projection and the second FFN matrix of each layer, 5 of 12 units.
    layers = [sublayer for sublayer in sizes if sublayer[0] != embedding and len(sublayer) > 3]
    kept = flexgen.resident_bytes(layers, 30)
    assert kept / sum(map(sum, layers)) == pytest.approx(5 / 12, rel=1e-3)
    # At 50 % the large first matrix of the first list, the embedding, is on disk.
    assert flexgen.resident_bytes(sizes[:1], 50) == sum(sizes[0]) - embedding
    assert flexgen.resident_bytes(sizes[:1], 52) == sum(sizes[0])
    shares = np.linspace(0, 1, 6)
    resident = [flexgen.resident_bytes(sizes, flexgen.percent_for_share(sizes, s)) for s in shares]
    assert all(kept <= share * total for kept, share in zip(resident, shares, strict=True))
    assert resident == sorted(resident)
    assert resident[-1] == total


def test_flexgen_files_hold_the_models_numbers_in_float16(tiny, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_model(TINY, model)
    flexgen.convert(model, tmp_path / "opt-np")
    files = sorted(path.name for path in (tmp_path / "opt-np").iterdir())
    assert len(files) == len(list(tiny))
    assert "decoder.layer_norm.weight" in files
    assert "decoder.layers.0.final_layer_norm.weight" in files
    loaded = np.load(tmp_path / "opt-np" / "decoder.layers.1.fc1.weight")
    expected = checkpoint.to_float32(tiny["model.decoder.layers.1.fc1.weight"])
    assert loaded.dtype == np.float16
    np.testing.assert_array_equal(loaded, expected.astype(np.float16))


def test_accelerate_keeps_as_many_layers_as_fit(tiny):
    layer = sum(tiny[n].nbytes for n in tiny if n.startswith("model.decoder.layers.0."))
    others = TINY.num_bytes - 3 * layer
    for layers in range(4):
        share = (others + layers * layer) / TINY.num_bytes
        assert accelerate_disk.resident_plan(tiny, min(1.0, share + 1e-9)) == (
            layers,
            others + layers * layer,
        )
    assert accelerate_disk.resident_plan(tiny, 0.0) == (0, others)
    places = accelerate_disk.device_map(3, 1)
    assert [places[f"model.decoder.layers.{i}"] for i in range(3)] == ["cpu", "disk", "disk"]
