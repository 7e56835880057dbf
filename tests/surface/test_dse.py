# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered dse`: what it prints and writes, and how it exits."""

import json
import re
from pathlib import Path

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.cli.main import main

SMALL = ["--model", "Llama3-8B", "--batch", "8", "--context", "2048", "--l2-mib", "8:40:16"]
DOCS = Path(__file__).parents[2] / "docs" / "notes"


def test_json_has_the_papers_result(capsys):
    assert main(["dse", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    high, low = answer["with_prefetch"], answer["without_prefetch"]
    assert (high["best_l2_mib"], low["best_l2_mib"]) == (104, 8)
    assert high["throughput_density"] == pytest.approx(14.8, rel=0.05)
    assert low["throughput_density"] == pytest.approx(11.8, rel=0.05)
    for figure in ("figure_2", "figure_5", "figure_7", "figure_8", "figure_9", "table_1"):
        assert answer[figure]


def test_tables_mark_fitted_figures(capsys):
    assert main(["dse"]) == 0
    out = capsys.readouterr().out
    assert "With prefetch: best L2 104 MiB" in out
    assert re.search(r"density without prefetch .* fitted\n", out)
    assert "Modelled, nothing is measured." in out
    for title in (
        "Figure 2",
        "Figure 5",
        "Figure 6",
        "Figure 7",
        "Figure 8",
        "Figure 9",
        "Table 1",
    ):
        assert f"\n{title}: " in out


def test_another_space(capsys):
    assert main(["dse", *SMALL, "--num-devices", "8", "--cluster-sizes", "4,2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["asked"] == {
        "models": ["Llama3-8B"],
        "batches": [8],
        "contexts": [2048],
        "l2_mib": [8, 24, 40],
        "num_devices": 8,
        "cluster_sizes": [2, 4],
    }
    assert len(answer["with_prefetch"]["throughput_density_by_l2"]) == 3
    assert "claims" not in answer


def test_a_config_of_a_known_model_gives_the_same_result(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    results = []
    for model in (str(folder), "llama3-8b"):
        assert main(["dse", *SMALL, "--model", model, "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["figure_8"])
    (mine, known) = ([point["by_model"] for point in result] for result in results)
    assert [each["mine"] for each in mine] == [each["Llama3-8B"] for each in known]


def test_a_page_with_pictures(tmp_path, capsys):
    assert main(["dse", *SMALL, "--out", str(tmp_path)]) == 0
    page = tmp_path / "accelerator.md"
    assert capsys.readouterr().out.rstrip().endswith(str(page))
    text = page.read_text()
    assert f"vllm-tiered dse {' '.join(SMALL)} --out {tmp_path}" in text
    linked = re.findall(r"\]\((accelerator/\w+\.png)\)", text)
    assert len(linked) == 6
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in linked)


def test_the_committed_page_matches_the_command(tmp_path):
    assert main(["dse", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "accelerator.md").read_text()
    assert written.replace(str(tmp_path), "docs/notes") == (DOCS / "accelerator.md").read_text()
    pictures = list((DOCS / "accelerator").glob("*.png"))
    assert {path.name for path in pictures} == {
        path.name for path in (tmp_path / "accelerator").iterdir()
    }
    assert all(path.stat().st_size < 60_000 for path in pictures)


def test_a_model_that_exceeds_the_hbm_exits_3(capsys):
    assert main(["dse", "--model", "Llama3-405B", "--num-devices", "2", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] is False
    assert "on each of 2 devices, whose HBM has 64 GB: give more --num-devices" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "Llama9"], "give a folder with config.json, or one of Llama3-8B"),
        (["--batch", "8,x"], "give a whole number, at least 1"),
        (["--batch", "0"], "give a whole number, at least 1"),
        (["--l2-mib", "8-200"], "give FIRST:LAST:STEP"),
        (["--l2-mib", "200:8:8"], "the last has to be at least the first"),
        (["--l2-mib", "8:200:0"], "the step at least 1"),
        (["--l2-mib", "0:1000000:1"], "for at most 1000"),
    ],
)
def test_wrong_usage_exits_2(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["dse", *args])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_bad_input_exits_1(tmp_path, capsys):
    assert main(["dse", "--context", "2"]) == 1
    assert "a context of at least 3" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["dse", "--model", str(tmp_path)]) == 1
    assert "config.json has no hidden_size" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["dse", *SMALL, "--out", str(blocked)]) == 1
    assert "cannot be written" in capsys.readouterr().err
