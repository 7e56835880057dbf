# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered plan`: what it prints, and how it exits."""

import contextlib
import json
import os
import re
import shlex

import pytest
import scipy.optimize

from tests.fixtures import neuron_stores
from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.adapter import cli_args
from vllm_tiered.cli.main import main
from vllm_tiered.config import FfnConfig, TieredConfig
from vllm_tiered.ffn.open import load_predictors, make_plan
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.kv.layout import LayerStack
from vllm_tiered.planner import choice_counts
from vllm_tiered.planner import plan as planner_plan
from vllm_tiered.planner.fit import evaluate_placements

RESULTS: dict[str, list[object]] = {}


def results(*args, **options):
    """Return the results, evaluated once: many tests differ only in what they print."""
    key = repr((args, options))
    if key not in RESULTS:
        RESULTS[key] = list(evaluate_placements(*args, **options))
    return RESULTS[key]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a folder for what vLLM says of models, which takes it ten seconds each."""
    return tmp_path_factory.mktemp("answers")


@pytest.fixture
def model(tmp_path, answers, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(answers))
    monkeypatch.setattr(planner_plan, "evaluate_placements", results)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return str(tmp_path)


def plan(model, *args, near="8", far="64"):
    budgets = ["--near-gib", near, "--far-gib", far]
    return main(["plan", model, *budgets, "--machine", "rtx4090-pcie4", *args])


def test_it_prints_a_line_per_placement(model, capsys):
    assert plan(model) == 0
    out = capsys.readouterr().out
    assert "32 layers of 13.00 GiB" in out
    for placement in ("flexgen", "helm", "all_far", "latency"):
        assert f"\n{placement}" in out
    assert "all near does not fit: 13.00 GiB of layers" in out
    assert "Predicted for rtx4090-pcie4; its figures:" in out


def test_json_has_every_figure_with_its_kind(model, capsys):
    assert plan(model, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert answer["machine"]["figures"]["read_gb_per_s"]["kind"] == "assumed"
    by_name = {entry["placement"]: entry for entry in answer["placements"]}
    assert by_name["latency"]["tokens_per_s"] > 0
    assert by_name["all_far"]["prefetch_depth"] == 1 <= by_name["latency"]["prefetch_depth"]
    assert "reason" in by_name["all near"]


def test_the_target_marks_a_row(model, capsys):
    assert plan(model) == 0
    assert "\nthroughput *" in capsys.readouterr().out
    assert plan(model, "--max-num-seqs", "1") == 0
    assert "\nlatency *" in capsys.readouterr().out
    assert plan(model, "--target", "latency", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["target"], answer["chosen"]) == ("latency", "latency")


def test_it_prints_the_command_that_serves_the_plan(model, capsys):
    plan(model)
    out = capsys.readouterr().out
    begin = f"  vllm serve {model} --plugin tiered --tiered-config.weights.placement "
    assert f"{begin}throughput --tiered-config.weights.near_gib 6.042 " in out
    assert "--max-model-len 640 --max-num-seqs " in out
    plan(model, "--target", "latency", "--dtype", "bfloat16")
    out = capsys.readouterr().out
    assert f"{begin}latency --tiered-config.weights.near_gib 5.954 " in out
    assert "--kv-cache-memory-bytes 9" in out and "--dtype bfloat16" in out


def test_chunks_of_prompts_are_those_of_the_command(model, capsys):
    args = ("--prompt-tokens", "4096", "--output-tokens", "16", "--target", "latency")
    seconds = []
    for chunk in ("512", "4096"):
        chunks = (*args, "--max-num-batched-tokens", chunk)
        assert plan(model, *chunks, near="3") == 0
        assert f" --max-num-batched-tokens {chunk}\n" in capsys.readouterr().out
        assert plan(model, *chunks, "--json", near="3") == 0
        answer = json.loads(capsys.readouterr().out)
        (latency,) = (one for one in answer["placements"] if one["placement"] == "latency")
        seconds.append(latency["prefill_seconds"])
    assert seconds[0] > 2 * seconds[1], "far weights are read eight times, or once"


def test_fewer_tokens_than_requests_a_step_are_refused(model, capsys):
    assert plan(model, "--max-num-batched-tokens", "64") == 1
    assert "64 is less than --max-num-seqs 256" in capsys.readouterr().err


def test_the_command_is_one_that_vllm_understands(model, capsys):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args.install()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    plan(model)
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  vllm serve"))
    asked = parser.parse_args(["--model", *line.split()[2:]])
    assert asked.model == model
    assert asked.max_model_len == 640 and asked.max_num_seqs > 1
    weights = TieredConfig.from_dict(asked.additional_config["tiered"]).weights
    assert (weights.placement, weights.near_gib) == ("throughput", 6.042)


def test_the_command_names_the_folder_of_a_config_json_quoted(
    tmp_path, answers, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(answers))
    monkeypatch.setattr(planner_plan, "evaluate_placements", results)
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert plan(str(folder / "config.json")) == 0
    assert f"vllm serve '{folder}' --plugin tiered" in capsys.readouterr().out


def test_a_request_longer_than_the_model_allows_is_refused_with_the_numbers(model, capsys):
    assert plan(model, "--prompt-tokens", "8100") == 1
    assert "8100 prompt and 128 output tokens are more than the 8192" in capsys.readouterr().err


def test_why_says_what_binds_and_what_would_help(model, capsys):
    plan(model)
    without = capsys.readouterr().out
    assert "sublayer" in without and "bound by" not in without
    plan(model, "--why")
    out = capsys.readouterr().out
    assert "decode bound by" in out
    assert "336.00 MiB more near memory each" in out
    assert "More far memory would not help." in out
    assert "If the host's processor computed " in out
    assert plan(model, "--why", near="12", far="5") == 0
    assert "More far memory would help: with 13.00 GiB" in capsys.readouterr().out


def test_energy_follows_the_grid(model, capsys):
    joules, grams = [], []
    for intensity in ("820", "41"):
        plan(model, "--json", "--carbon-intensity", intensity)
        placements = json.loads(capsys.readouterr().out)["placements"]
        (entry,) = (entry for entry in placements if entry["placement"] == "all_far")
        joules.append(entry["joules_per_token"])
        grams.append(entry["gco2e_per_token"])
        assert len(entry["batches"]) > 4
    assert joules[0] == joules[1] > 0
    assert grams[0] == pytest.approx(20 * grams[1])
    plan(model)
    assert "J/token" in capsys.readouterr().out


def test_without_power_figures_there_is_no_energy(model, capsys):
    plan(model, "--machine", "cpu-2core")
    out = capsys.readouterr().out
    assert "J/token" not in out
    assert "No energy figures: the power of cpu-2core is not known." in out


def test_nothing_but_json_is_printed(model, capfd, monkeypatch):
    """The solver's library prints past Python, for some budgets."""
    calls: list[object] = []

    def noisy(*args, **kwargs):
        calls.append(args)
        os.write(1, b"HighsMipSolverData::transformNewIntegerFeasibleSolution\n")
        return scipy.optimize.milp(*args, **kwargs)

    monkeypatch.setattr(choice_counts, "milp", noisy)
    RESULTS.clear()
    assert plan(model, "--json") == 0 and calls
    captured = capfd.readouterr()
    json.loads(captured.out)
    assert captured.err == ""


def test_with_matrices_in_4_bit(model, capsys):
    assert plan(model, "--compress", "int4") == 0
    out = capsys.readouterr().out
    assert "32 layers of 4.06 GiB" in out  # 0.625 of 6.5 GiB of 8-bit weights
    assert "\nall near " in out and "all near does not fit" not in out
    assert "Assumed" not in out
    assert plan(model, "--compress", "int4", "--why") == 0
    said = "Assumed: matmuls with weights in 4 bit take 2.5 times as long as in 16 bit"
    assert said in capsys.readouterr().out
    assert plan(model, "--compress", "int4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"]["gemms"].startswith(said)


def test_what_does_not_fit_exits_3(model, capsys):
    assert plan(model, near="2") == 3
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert re.search(r"\nIt would fit with [\d.]+ (GiB|MiB) more near memory \([\d.]+ GiB\): ", out)


def test_what_exceeds_far_memory_is_stored_if_the_disk_is_known(model, capsys):
    args = ("--json", "--storage", "--machine", "cpu-2core")
    assert plan(model, *args, near="8", far="2") == 0
    answer = json.loads(capsys.readouterr().out)
    by_name = {result["placement"]: result for result in answer["placements"]}
    for name in ("flexgen", "all_far", "latency"):
        assert 0 < by_name[name]["far_bytes"] <= 2 * 2**30
        assert by_name[name]["storage_bytes"] > 0
    slow, fast = by_name["all_far"], by_name["latency"]
    assert fast["batches"][0]["decode_seconds"] < slow["batches"][0]["decode_seconds"]
    # From the disk alone: no step is shorter than its bytes take.
    assert slow["batches"][0]["decode_seconds"] > slow["storage_bytes"] / 2.0e9
    assert any(part["storage_bytes"] for part in answer["sublayers"])
    assert plan(model, "--storage", "--why", "--machine", "cpu-2core", near="8", far="2") == 0
    assert "stored" in capsys.readouterr().out


def test_an_unknown_disk_is_said(model, capsys):
    assert plan(model, "--storage", "--machine", "cpu-2core-ssd") not in (0, 3)
    assert "how fast this machine reads from storage: measure it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json: cannot be read: No such file"),
        ("{", "is not valid JSON"),
        ("[]", "is not a model's configuration"),
        ("{}", "vLLM does not build it"),
    ],
)
def test_bad_models_are_named(tmp_path, answers, monkeypatch, capsys, content, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(answers))
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert plan(str(tmp_path)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ("--prompt-tokens", "0"),
        ("--tensor-parallel-size", "x"),
        ("--near-gib", "-1"),
        ("--carbon-intensity", "-1"),
        ("--max-tbt", "0"),
        ("--max-ttft", "soon"),
    ],
)
def test_numbers_out_of_range_are_refused(model, capsys, args):
    with pytest.raises(SystemExit) as stopped:
        plan(model, *args)
    assert stopped.value.code == 2
    assert f"argument {args[0]}: {args[1]!r}: give" in capsys.readouterr().err


def test_an_unknown_machine_names_the_known_ones(model, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", model, "--near-gib", "8", "--far-gib", "8", "--machine", "abacus"])
    assert stopped.value.code == 2
    assert "rtx4090-pcie4" in capsys.readouterr().err


def test_limits_leave_fewer_requests_or_no_plan(model, capsys):
    assert plan(model, "--json", near="16") == 0
    free = json.loads(capsys.readouterr().out)
    assert plan(model, "--json", "--max-tbt", "25", near="16") == 0
    limited = json.loads(capsys.readouterr().out)
    assert limited["asked"]["limits"] == {"ttft_seconds": None, "tbt_seconds": 0.025}

    def fits(answer):
        return {p["placement"]: p for p in answer["placements"] if "requests" in p}

    assert fits(limited).keys() < fits(free).keys()
    assert all(one["decode_seconds"] <= 0.025 for one in fits(limited).values())
    assert plan(model, "--max-ttft", "0.001", near="16") == 3
    out = capsys.readouterr().out
    assert "all_far does not fit: the time to first token is" in out


def test_the_plans_that_no_other_beats_are_listed(model, capsys):
    assert plan(model, "--pareto", near="16") == 0
    out = capsys.readouterr().out
    assert "\nno other plan beats" in out
    assert plan(model, "--pareto", "--json", near="16") == 0
    front = json.loads(capsys.readouterr().out)["pareto"]
    steps = [entry["decode_seconds"] for entry in front]
    rates = [entry["tokens_per_s"] for entry in front]
    assert len(front) > 2 and steps == sorted(steps) and rates == sorted(rates)


def test_it_says_what_would_be_faster(model, capsys):
    assert plan(model, "--suggest", "--target", "latency") == 0
    assert "\nIt would be faster with a variant in 4-bit" in capsys.readouterr().out
    assert plan(model, "--suggest", "--target", "latency", "--json") == 0
    changes = json.loads(capsys.readouterr().out)["suggestions"]
    assert any("more (12.00 GiB)" in change["change"] for change in changes)


def served_by(out):
    """Return the words of the printed command as options."""
    (line,) = (x for x in out.splitlines() if x.startswith("  vllm serve"))
    words = shlex.split(line)
    return dict(zip(words, [*words[1:], ""], strict=True))


def test_kv_swapping_is_planned_and_the_command_leaves_room_for_it(model, capsys):
    assert plan(model, "--machine", "gh200", near="20") == 0
    out = capsys.readouterr().out
    found = re.search(
        r"With KV swapping, which is on by default: (\d+) requests instead of (\d+),", out
    )
    assert found and int(found[1]) > int(found[2])
    options = served_by(out)
    assert options["--max-num-seqs"] == found[1]
    assert "--tiered-config.kv.expansion" not in options
    assert plan(model, "--machine", "gh200", "--json", near="20") == 0
    answer = json.loads(capsys.readouterr().out)
    by_name = {p["placement"]: p for p in answer["placements"]}
    swapped = by_name["all near"]["kv_swapping"]
    assert swapped["served"]["requests"] > by_name["all near"]["requests"]
    assert swapped["expansion"] > 1 and swapped["is_adaptive"]
    chosen = by_name[answer["chosen"]]["kv_swapping"]
    far_gib = float(options["--tiered-config.kv.far_gib"])
    assert 0 <= far_gib - chosen["far_bytes"] / 2**30 < 0.001 + 1e-9
    assert plan(model, "--max-num-seqs", "2", near="20") == 0
    assert "All 2 requests fit, so KV swapping has nothing to add." in capsys.readouterr().out


def test_the_placement_that_is_best_with_kv_swapping_is_served(model, capsys):
    """The engine's own choice would be another, so the command names the placement."""
    asked = ("--machine", "h200-pcie5", "--prompt-tokens", "2048", "--output-tokens", "512")
    assert plan(model, *asked, near="16") == 0
    out = capsys.readouterr().out
    assert "\nall near *" in out and "KV swapped" in out
    assert "\nWith KV swapping, at a fixed expansion: 4 requests instead of 3, " in out
    assert 'placement "auto", would be throughput, as it compares placements without' in out
    options = served_by(out)
    assert "--tiered-config.weights.placement" not in options
    assert options["--max-num-seqs"] == "4"
    assert plan(model, *asked, "--json", near="16") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["chosen"], answer["auto"]) == ("all near", "throughput")
    (chosen,) = (p for p in answer["placements"] if p["placement"] == "all near")
    fixed = float(options["--tiered-config.kv.expansion"])
    assert LayerStack(32).num_far_for(fixed) == chosen["kv_swapping"]["far_layers"]


def test_every_placement_may_be_served_as_planned(model, capsys, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args.install()
    for name in ("all near", "flexgen", "helm", "all_far", "latency", "throughput"):

        def only(made, name=name):
            return next(fit for fit in made.results if fit.placement == name)

        monkeypatch.setattr(planner_plan.Plan, "chosen", property(only))
        assert plan(model, near="16") == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x[:12] == "  vllm serve")
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        asked = parser.parse_args(["--model", *shlex.split(line)[2:]])
        given = TieredConfig.from_dict((asked.additional_config or {}).get("tiered", {}))
        assert given.weights.placement == ("off" if name == "all near" else name)
        assert given.weights.percents == ((20, 80, 0) if name == "flexgen" else None)


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def test_a_mixture_larger_than_near_memory_keeps_some_experts_there(
    tmp_path, answers, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(answers))
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    # Experts take 1.31 GiB, the rest 0.20.
    args = ("--max-num-seqs", "4", "--output-tokens", "16", "--prompt-tokens", "64")
    assert plan(str(tmp_path), *args, near="0.9") == 0
    out = capsys.readouterr().out
    assert "\nexperts in slots *" in out
    assert " of 8 experts of each layer have a slot" in out
    near = re.search(r"--tiered-config.experts.near_gib ([\d.]+) --kv-cache-memory-bytes \d+", out)
    assert near and 0.3 < float(near[1]) < 0.7
    assert plan(str(tmp_path), *args, "--json", near="0.9") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["chosen"] == "experts in slots"
    assert 2 <= answer["experts_in_slots"]["slots"] < 8
    assert answer["experts_in_slots"]["kv_swapping"] is None  # all four requests fit
    assert plan(str(tmp_path), *args, near="0.9", far="1") == 3
    assert "experts in slots does not fit: 1.31 GiB of experts exceed" in capsys.readouterr().out


def test_a_mixture_beside_swapped_kv_or_far_weights(tmp_path, answers, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(answers))
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    args = ("--machine", "gh200", "--output-tokens", "512", "--prompt-tokens", "512")
    assert plan(str(tmp_path), *args, near="0.9") == 0
    out = capsys.readouterr().out
    found = re.search(r"\nWith KV swapping, .*: (\d+) requests instead of (\d+), ", out)
    assert found and int(found[1]) > int(found[2])
    options = served_by(out)
    assert options["--max-num-seqs"] == found[1]
    assert {"--tiered-config.experts.near_gib", "--tiered-config.kv.far_gib"} < options.keys()
    assert plan(str(tmp_path), *args, "--json", near="0.9") == 0
    slots = json.loads(capsys.readouterr().out)["experts_in_slots"]
    assert slots["kv_swapping"]["served"]["requests"] == int(found[1])
    # Other weights take 0.16 GiB, a token's experts 0.33, a request 0.01: some weights are far.
    assert plan(str(tmp_path), *args, near="0.485") == 0
    out = capsys.readouterr().out
    assert "of the other weights are far, as near memory does not hold them beside" in out
    assert served_by(out)["--tiered-config.weights.placement"] in ("latency", "all_far")


def test_a_card_leaves_less_than_its_memory(model, capsys):
    args = ["plan", model, "--card-gib", "24", "--far-gib", "64", "--machine", "rtx4090-pcie4"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "Of 24.00 GiB, 92% is vLLM's (--gpu-memory-utilization), of which CUDA takes" in out
    assert main([*args, "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)["asked"]
    # 2048 tokens of 2 x 4096 and 1.5 x 28672 in 16 bit; float32 logits of 256 requests, twice.
    activations = 2048 * (2 * 4096 + 1.5 * 28672) * 2 + 2 * 4 * 256 * 128256
    assert asked["card"]["activation_bytes"] == activations
    assert asked["near_bytes"] == int(0.92 * 24 * 2**30) - int(0.75 * 2**30) - activations
    with pytest.raises(SystemExit):
        main([*args, "--near-gib", "8"])
    args[3] = "1"
    assert main(args) == 1
    assert "1.00 GiB of card memory leave nothing near beside" in capsys.readouterr().err


def test_far_memory_of_several_tiers(model, capsys):
    machine = ["--machine", "a100-dram-cxl-fpga"]
    assert plan(model, *machine, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    by_name = {entry["placement"]: entry for entry in answer["placements"]}
    far = by_name["all_far"]["far_bytes"]
    assert by_name["all_far"]["far_bytes_by_tier"] == {"DRAM": far, "CXL": 0}
    assert answer["machine"]["figures"]["CXL: read_gb_per_s"]["kind"] == "published"
    assert plan(model, *machine) == 0
    assert " in DRAM (24.6 GB/s); 24.6 GB/s together" in capsys.readouterr().out


def test_one_tier_is_not_spoken_of(model, capsys):
    assert plan(model, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert {entry.get("far_bytes_by_tier") for entry in answer["placements"]} == {None}
    assert plan(model) == 0
    assert "Far weights:" not in capsys.readouterr().out


def test_more_far_memory_than_the_tiers_have_is_refused(model, capsys):
    assert plan(model, "--machine", "a100-dram-cxl-fpga", far="800") == 1
    said = capsys.readouterr().err
    assert "--far-gib 800 is more than the 768.00 GiB" in said and "DRAM, CXL" in said


SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 640,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def stored_ffn(tmp_path, answers, monkeypatch):
    """A model and the neuron store of its FFN."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(answers))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    return str(folder), str(
        neuron_stores.written(tmp_path / "store", neuron_stores.MIDDLE, has_gates=True)
    )


def test_a_neuron_store_is_planned_as_the_engine_does(stored_ffn, capsys):
    model, folder = stored_ffn
    args = ("--ffn-store", folder, "--max-num-seqs", "2")
    assert plan(model, *args, "--json", near="1", far="1") == 0
    found = json.loads(capsys.readouterr().out)["ffn_store"]
    config = FfnConfig(store=folder, far_gib=1.0)
    with contextlib.closing(NeuronStore.open(folder)) as store:
        made = make_plan(config, store, load_predictors(store), num_ranks=1)
    assert found["near_bytes"] == made.near_bytes
    assert found["dense_bytes"] == 3 * 200 * 3 * 640 * 2
    assert (found["missing_share"], found["is_calibrated"]) == (1.0, False)
    assert "the dense FFN needs 2.20 MiB" in found["steps_aside"]
    assert plan(model, *args, near="1", far="1") == 0
    out = capsys.readouterr().out
    assert "The FFN from the store: " in out and "instead of 2.20 MiB. 100% of what a tok" in out
    assert "\nWith default settings the engine leaves the FFN to vLLM: the neurons need " in out
    # Nothing needs fewer bytes, and few of them are of the FFN.
    assert re.search(r"\nIt is not worth it: a variant in 4-bit .* would be 1\.\d times as", out)
    assert plan(model, "--max-num-seqs", "2", near="1", far="1") == 0
    assert "FFN from the store" not in capsys.readouterr().out


def test_a_store_that_the_engine_would_refuse_is_refused(model, stored_ffn, tmp_path, capsys):
    small, folder = stored_ffn
    assert plan(model, "--ffn-store", folder) == 1
    assert "holds 3 layers with 2304000 bytes of FFN" in capsys.readouterr().err
    assert plan(small, "--ffn-store", str(tmp_path), near="1", far="1") == 1
    assert str(tmp_path) in capsys.readouterr().err
    disk = "it is not known how fast this machine reads the others from storage"
    machine = ("--machine", "cpu-2core-ssd")
    assert plan(small, "--ffn-store", folder, *machine, near="1", far="0.001") == 1
    assert disk in capsys.readouterr().err
    mixture = tmp_path / "mixture"
    mixture.mkdir()
    (mixture / "config.json").write_text(json.dumps(MIXTRAL))
    assert plan(str(mixture), "--ffn-store", folder) == 1
    assert "--ffn-store does not go with a mixture of experts" in capsys.readouterr().err


def test_a_store_that_does_not_fit_says_what_it_takes(stored_ffn, capsys):
    """Embeddings, head, attention and one request's KV take 92.3 MiB, which leaves 1."""
    small, folder = stored_ffn
    args = ("--ffn-store", folder, "--max-num-seqs", "1")
    assert plan(small, *args, near="0.0912", far="1") in (0, 3)
    assert "The FFN from the store does not fit: tiered.ffn.near_gib" in capsys.readouterr().out
    assert plan(small, *args, "--max-tbt", "1", "--json", near="1", far="1") == 3
    assert "with one request" in json.loads(capsys.readouterr().out)["ffn_store"]["reason"]
