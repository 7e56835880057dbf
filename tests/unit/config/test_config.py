# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered.config import SECTIONS, KvConfig, ReportConfig, TieredConfig, WeightsConfig
from vllm_tiered.config.rules import MAX_GIB
from vllm_tiered.errors import ConfigError

FACTORS = st.floats(min_value=1, max_value=1e6)
SIZES = st.floats(min_value=0, exclude_min=True, max_value=MAX_GIB)
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
CONFIGS = st.builds(
    TieredConfig,
    kv=st.builds(
        KvConfig,
        enabled=st.booleans(),
        far_gib=st.just("auto") | SIZES,
        expansion=st.just("auto") | FACTORS,
        max_expansion=FACTORS,
        policy=st.sampled_from(["interleave", "on_demand"]),
        tier=st.sampled_from(["far", "storage"]),
        path=st.none() | PATHS,
        verify=st.sampled_from(["off", "sample", "full"]),
    ),
    report=st.builds(ReportConfig, path=st.none() | PATHS, carbon_intensity=st.floats(0, 2000)),
)


@given(CONFIGS)
def test_dict_round_trip(config):
    assert TieredConfig.from_dict(config.to_dict()) == config


@given(CONFIGS)
def test_json_round_trip(config):
    text = json.dumps(config.to_dict(), allow_nan=False)
    assert TieredConfig.from_dict(json.loads(text)) == config


@given(CONFIGS)
def test_every_value_may_be_text(config):
    as_text = {
        section: {key: str(value) for key, value in keys.items() if value is not None}
        for section, keys in config.to_dict().items()
    }
    assert TieredConfig.from_dict(as_text) == config


def test_given_keys_go_over_the_defaults():
    config = TieredConfig.from_dict({"kv": {"far_gib": "8", "enabled": "false"}})
    assert config == TieredConfig(kv=KvConfig(far_gib=8.0, enabled=False))


def test_numbers_become_floats():
    assert repr(KvConfig(far_gib=8).far_gib) == "8.0"


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KvConfig().expansion = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kb": {}}, "tiered.kv"),
        ({"kv": {"far_gb": 1}}, "tiered.kv.far_gib"),
        ({"kv": {"expantion": 2}}, "tiered.kv.expansion"),
        ({"kv": {"max-expansion": 2}}, "tiered.kv.max_expansion"),
        ({"kv": {"polici": "on_demand"}}, "tiered.kv.policy"),
        ({"reports": {}}, "tiered.report"),
        ({"report": {"pth": "t.jsonl"}}, "tiered.report.path"),
        # A key one level too high is the usual slip: say where it belongs.
        ({"far_gib": 8}, "tiered.kv.far_gib"),
    ],
)
def test_unknown_key_names_the_nearest(values, named):
    with pytest.raises(ConfigError, match=rf"unknown key .* did you mean {named}\?"):
        TieredConfig.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 1),
        ("enabled", "yes"),
        ("far_gib", -1.5),
        ("far_gib", float("nan")),
        ("far_gib", float("inf")),
        ("far_gib", 10**30),
        ("far_gib", True),
        ("far_gib", None),
        ("far_gib", "8 GiB"),
        ("expansion", 0.5),
        ("expansion", "0.99"),
        ("expansion", "automatic"),
        ("max_expansion", 0.5),
        ("max_expansion", "auto"),
        ("policy", "lru"),
        ("policy", ["on_demand"]),
        ("tier", "ssd"),
        ("path", ""),
        ("path", 3),
        ("verify", True),
    ],
)
def test_a_bad_value_is_named_with_the_valid_ones(key, value):
    with pytest.raises(ConfigError) as caught:
        TieredConfig.from_dict({"kv": {key: value}})
    assert f"tiered.kv.{key} is {value!r}: set it to " in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"far_gib": 0}, r"far_gib is 0: set it to a number > 0, or set .*tier"),
        ({"tier": "storage"}, r"tier is .*: set tiered\.kv\.path"),
        (
            {"tier": "storage", "path": "/ssd", "prefix_store": True},
            r'prefix_store is true, .* set tiered\.kv\.tier to "far"',
        ),
        ({"path": "/ssd"}, r"path is '/ssd', but nothing is stored there: set tiered\.kv\.tier"),
    ],
)
def test_keys_that_do_not_go_together(keys, named):
    with pytest.raises(ConfigError, match=named):
        KvConfig(**keys).check()
    KvConfig(tier="storage", path="/ssd", far_gib=0).check()


@pytest.mark.parametrize("percents", [[20, 80, 0], (20.0, 80.0, 0.0), "[20, 80, 0]", "20,80,0"])
def test_percents_are_a_list_of_numbers(percents):
    config = TieredConfig.from_dict({"weights": {"placement": "flexgen", "percents": percents}})
    assert config.weights.percents == (20.0, 80.0, 0.0)
    assert TieredConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("percents", ["", [], "a,b", 20, [20, None], [float("nan")], {20: 80}])
def test_bad_percents_are_named(percents):
    with pytest.raises(ConfigError, match=r"weights\.percents is .*: set it to a list of numbers"):
        TieredConfig.from_dict({"weights": {"percents": percents}})


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"placement": "flexgen"}, r'placement is "flexgen": set .*percents'),
        ({"placement": "latency"}, r'placement is "latency": set .*near_gib'),
        ({"placement": "throughput"}, r'"throughput": set .*near_gib .* KV cache of a rank have'),
        ({"placement": "auto"}, r'placement is "auto": set .*near_gib'),
        ({"placement": "helm", "percents": [1, 2, 3]}, r"which only the placement .flexgen. reads"),
        (
            {"compress": "int4"},
            r'compress is "int4", but weights are left to vLLM: set .*placement',
        ),
        ({"near_gib": 8}, r"near_gib is 8, but no weight is placed: set .*placement"),
        ({"far_gib": 8}, r"far_gib is 8, but no weight is placed: set .*placement"),
        ({"storage_path": "/ssd"}, r"storage_path is '/ssd', but no weight is placed: set .*plac"),
        (
            {"placement": "flexgen", "percents": [20, 40, 40]},
            r"third is the share of storage: set .*storage_path",
        ),
    ],
)
def test_weights_keys_that_do_not_go_together(keys, named):
    with pytest.raises(ConfigError, match=named):
        TieredConfig.from_dict({"weights": keys}).check()


@pytest.mark.parametrize("placement", ["throughput", "auto"])
def test_shared_near_memory_goes_with_storage_and_4_bit(placement):
    keys = {"placement": placement, "near_gib": 1, "storage_path": "/ssd", "compress": "int4"}
    TieredConfig.from_dict({"weights": keys}).check()


def test_which_placements_share_near_memory_with_the_kv_cache():
    placements = ("off", "flexgen", "helm", "all_far", "latency", "throughput", "auto")
    sharing = [
        name for name in placements if WeightsConfig.from_dict({"placement": name}).shares_with_kv
    ]
    assert sharing == ["throughput", "auto"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.NAME)
def test_every_key_is_described(section):
    reference = section.reference()
    names = [f"tiered.{section.NAME}.{name}" for name in section.key_names()]
    assert [key.name for key in reference] == names
    for key in reference:
        assert key.values
        assert key.meaning.endswith(".")
        assert key.default == getattr(section(), key.name.rpartition(".")[2])


def test_the_description_of_a_key():
    described = {key.name: key for key in KvConfig.reference()}["tiered.kv.far_gib"]
    assert described.values == 'a number >= 0 and <= 1048576, or "auto"'
    assert described.default == "auto"
    assert described.meaning.startswith("Hard cap on the far memory")


def test_sections_are_the_fields_of_the_configuration():
    assert [section.NAME for section in SECTIONS] == list(TieredConfig().to_dict())


@pytest.mark.parametrize("value", ["", 3, True, ["t.jsonl"]])
def test_a_bad_report_path_is_named(value):
    with pytest.raises(ConfigError, match=r"tiered\.report\.path is .*: set it to the path of a"):
        TieredConfig.from_dict({"report": {"path": value}})


@pytest.mark.parametrize("value", [-1, "coal", float("nan"), None, True])
def test_a_bad_carbon_intensity_is_named(value):
    with pytest.raises(ConfigError, match=r"tiered\.report\.carbon_intensity is .*number >= 0"):
        TieredConfig.from_dict({"report": {"carbon_intensity": value}})


def test_direct_construction_is_checked_too():
    with pytest.raises(ConfigError, match=r"tiered\.kv\.expansion is 0\.5: .*>= 1"):
        KvConfig(expansion=0.5)


@pytest.mark.parametrize("values", [None, 3, "kv", [("kv", {})], {"kv": None}, {"kv": 8}])
def test_a_section_must_be_a_table(values):
    with pytest.raises(ConfigError, match="must be a table"):
        TieredConfig.from_dict(values)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tiered.json", '{"kv": {"far_gib": 8, "policy": "on_demand"}}'),
        ("tiered.toml", '[kv]\nfar_gib = 8\npolicy = "on_demand"\n'),
        ("tiered.TOML", 'kv = {far_gib = 8.0, policy = "on_demand"}'),
    ],
)
def test_from_file(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert TieredConfig.from_file(path) == TieredConfig(
        kv=KvConfig(far_gib=8.0, policy="on_demand")
    )
    assert TieredConfig.from_file(str(path)) == TieredConfig.from_file(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tiered.yaml", b"kv: {}", r'as "\.json" or "\.toml"'),
        ("tiered.json", b'{"kv": ', "not valid JSON"),
        ("tiered.toml", b"kv = ", "not valid TOML"),
        ("tiered.toml", b"\xff", "not valid TOML"),
        ("tiered.json", b"[]", "must be a table"),
        ("tiered.json", b'{"kv": {"expansion": NaN}}', "expansion is nan"),
        ("tiered.toml", b"[kv]\nexpansion = 0.5", "expansion is 0.5"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        TieredConfig.from_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["absent.json", "directory.toml"])
def test_an_unreadable_file_is_named(tmp_path, name):
    (tmp_path / "directory.toml").mkdir()
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: "):
        TieredConfig.from_file(tmp_path / name)


# Values that no user means ------------------------------------------------------------------

GIB_KEYS = (
    "kv.far_gib",
    "weights.near_gib",
    "weights.far_gib",
    "experts.near_gib",
    "experts.far_gib",
    "ffn.near_gib",
    "ffn.far_gib",
)
NUMBER_KEYS = (
    *GIB_KEYS,
    "kv.expansion",
    "kv.max_expansion",
    "ffn.window",
    "l2.budget_mib",
    "report.carbon_intensity",
    "report.embodied_kg",
    "report.lifetime_years",
)
PATH_KEYS = (
    "kv.path",
    "weights.storage_path",
    "experts.storage_path",
    "ffn.store",
    "report.path",
)


def from_key(key, value):
    section, name = key.split(".")
    return TieredConfig.from_dict({section: {name: value}})


@pytest.mark.parametrize("key", NUMBER_KEYS)
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(math.nan, id="nan"),
        pytest.param("nan", id="nan_text"),
        pytest.param(math.inf, id="inf"),
        pytest.param(-math.inf, id="minus_inf"),
        pytest.param(1e300, id="1e300"),
        pytest.param("1e300", id="1e300_text"),
        pytest.param(10**400, id="beyond_float"),
        pytest.param(-(16**5000), id="beyond_repr"),
    ],
)
def test_a_number_that_nothing_has_is_refused_with_its_key_and_its_range(key, value):
    with pytest.raises(ConfigError, match=rf"^tiered\.{key} is .*: set it to .*<= \d") as caught:
        from_key(key, value)
    assert len(str(caught.value)) < 300


def test_the_largest_size_is_a_pebibyte():
    assert from_key("kv.far_gib", 2**20).kv.far_gib == 2**20
    with pytest.raises(ConfigError, match="<= 1048576"):
        from_key("kv.far_gib", 2**20 + 1)


@pytest.mark.parametrize("key", PATH_KEYS)
@pytest.mark.parametrize("path", ["/tmp/a\0b", "\0", "/tmp/\ud800"], ids=["nul", "only", "half"])
def test_a_path_that_no_system_call_takes_is_refused(key, path):
    with pytest.raises(ConfigError, match=rf"^tiered\.{key} is '.*: set it to the path of a"):
        from_key(key, path)


def test_the_keys_that_are_paths_are_known():
    found = {f"{section.NAME}.{name}" for section in SECTIONS for name in section.path_names()}
    assert found == set(PATH_KEYS)


def nested(depth):
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"kv": value}
    return value


def test_a_table_nested_thousands_deep_is_refused():
    with pytest.raises(ConfigError, match=r"tiered\.kv\.kv|tiered\.kv is"):
        TieredConfig.from_dict(nested(5000))
    with pytest.raises(ConfigError, match=r"tiered\.kv\.far_gib is a dict too large to show"):
        from_key("kv.far_gib", nested(5000))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        pytest.param("a.json", '{"kv": {"far_gib": NaN}}', "far_gib is nan: set it to", id="nan"),
        pytest.param(
            "a.json", '{"kv": {"far_gib": 1e999}}', "far_gib is inf: set it to", id="1e999"
        ),
        pytest.param(
            "a.json", '{"kv": {"far_gib": ' + "9" * 5000 + "}}", "far_gib is inf: set", id="int"
        ),
        pytest.param("a.json", '{"kv": {}, "kv": {}}', "'kv' occurs 2 times", id="twice"),
        pytest.param(
            "a.json",
            '{"kv": {"far_gib": 1, "far_gib": 2}}',
            "'far_gib' occurs 2",
            id="twice_inside",
        ),
        pytest.param("a.json", '{"kv":' * 99_999, "64 tables and lists", id="nested"),
        pytest.param(
            "a.json", '{"kv":' * 100 + "1" + "}" * 100, "64 tables and lists", id="nested_little"
        ),
        pytest.param("a.json", "[" * 99_999, "64 tables and lists", id="lists"),
        pytest.param("a.json", '{"kv": {"path": "\\ud800"}}', "surrogate", id="surrogate"),
        pytest.param("a.json", " " * (1 << 20) + "{}", "more than 1.00 MiB", id="long"),
        pytest.param("a.toml", "[kv]\nfar_gib = inf", "far_gib is inf: set it to", id="toml_inf"),
        pytest.param("a.toml", "[kv]\nfar_gib = nan", "far_gib is nan: set it to", id="toml_nan"),
        pytest.param("a.toml", "[ffn]\nwindow = inf", "window is inf: set it", id="toml_window"),
        pytest.param("a.toml", "[kv]\nfar_gib = 1\nfar_gib = 2", "not valid TOML", id="toml_twice"),
        pytest.param("a.toml", "a = " + "[" * 99_999, "levels of nesting", id="toml_nested"),
        pytest.param("a.toml", "[kv]\nfar_gib = 0x" + "f" * 9999, "too large to show", id="hex"),
        pytest.param("a.toml", '[kv]\npath = "a\\u0000b"', r"path is 'a\\x00b'", id="toml_nul"),
    ],
)
def test_a_file_that_plays_tricks_is_refused_by_name(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        TieredConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_an_endless_file_is_not_read_to_its_end(tmp_path):
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"more than 1\.00 MiB"):
        TieredConfig.from_file(tmp_path / "zero.json")


@pytest.mark.parametrize("placement", ["off", "helm", "latency"])
def test_prompts_are_planned_for_by_few_placements(placement):
    weights = {"placement": placement, "prompt_tokens": 512}
    if placement == "latency":
        weights["near_gib"] = 1
    with pytest.raises(ConfigError, match=r"prompt_tokens is 512, and placement .* plans for no"):
        TieredConfig.from_dict({"weights": weights}).check()


@pytest.mark.parametrize("value", [0, -1, 1.5, "half", None, True])
def test_bad_prompts_are_named(value):
    with pytest.raises(ConfigError, match=r"prompt_tokens is .*: set it to a whole number"):
        TieredConfig.from_dict({"weights": {"prompt_tokens": value}})
