# SPDX-License-Identifier: Apache-2.0
"""What a folder can be asked is refused while the engine is configured, not after a load."""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.neuron_stores import SMALL, written
from vllm_tiered.adapter.checks import folders
from vllm_tiered.adapter.checks.folders import check_folders, least_file_bytes
from vllm_tiered.adapter.kv import worker
from vllm_tiered.adapter.kv.plan import fixed_limit
from vllm_tiered.config import KvConfig, TieredConfig
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.kv.layout import KvGeometry, LayerStack
from vllm_tiered.report.codec import FORMAT
from vllm_tiered.units import GIB, MIB

NUM_LAYERS = 30
TMPFS = Path("/dev/shm")


def engine(near_bytes=64 * MIB, *, executor="mp", world_size=1, kinds=None, stages=1):
    """The parts of a VllmConfig that the checks read."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            distributed_executor_backend=executor,
            world_size=world_size,
            local_world_size=world_size,
            pipeline_parallel_size=stages,
        ),
        additional_config={},
        model_config=SimpleNamespace(
            get_num_layers=lambda parallel: NUM_LAYERS // stages,
            get_total_num_hidden_layers=lambda: NUM_LAYERS,
            hf_text_config=SimpleNamespace(layer_types=kinds),
            is_hybrid=False,
        ),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=near_bytes),
    )


def stored(path, **values):
    return TieredConfig.from_dict({"kv": {"tier": "storage", "path": str(path)} | values})


def test_a_folder_that_can_be_used_is_left_empty(tmp_path):
    check_folders(stored(tmp_path), engine())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("partition", ["7,8,8,7", "8,7,7,8"])
def test_the_file_is_that_of_a_pipelines_largest_stage(tmp_path, monkeypatch, partition):
    """Its layers divide the near pages among most blocks; the smallest bounds the far layers."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    found = folders._layer_stack(engine(stages=4).model_config, engine(stages=4).parallel_config)
    assert found == LayerStack(8, smallest_stage=7)
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION")
    equal = engine(stages=2)
    assert folders._layer_stack(equal.model_config, equal.parallel_config) == LayerStack(15)
    with pytest.raises(ConfigError, match=r"8 layers \(and 7 in the smallest stage.*PARTITION"):
        check_folders(stored(tmp_path, expansion=4), engine(stages=4))


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", __file__):
        with pytest.raises(ConfigError, match=r"kv\.path is .*: no file can be made there"):
            check_folders(stored(path), engine())


def test_the_workers_of_ray_may_have_folders_that_this_host_has_not(tmp_path):
    check_folders(stored(tmp_path / "nowhere"), engine(executor="ray"))


@pytest.mark.parametrize("near_bytes", [64 * MIB, None])
def test_an_expansion_out_of_reach_is_refused_before_the_model_is_loaded(tmp_path, near_bytes):
    with pytest.raises(ConfigError, match=r"kv\.expansion=11 .*30 layers .* at most 10"):
        check_folders(stored(tmp_path, expansion=11), engine(near_bytes))
    # Its few layers of full attention may need one buffer only; that is known when it is built.
    hybrid = ["sliding_attention", "full_attention"] * 15
    check_folders(stored(tmp_path, expansion=11), engine(near_bytes, kinds=hybrid))


@pytest.mark.parametrize("values", [{"expansion": 3}, {"max_expansion": 3}], ids=["fixed", "auto"])
def test_a_full_disk_is_refused_with_the_numbers_and_the_knobs(tmp_path, values):
    near_bytes = 2 * shutil.disk_usage(tmp_path).free
    with pytest.raises(BudgetError, match=r"at least .* are free in its file .* raise kv\.far_gib"):
        check_folders(stored(tmp_path, far_gib=0, **values), engine(near_bytes))
    check_folders(stored(tmp_path, far_gib=2**20, **values), engine(near_bytes))


@pytest.mark.skipif(not TMPFS.is_dir(), reason="no tmpfs")
def test_a_file_system_that_is_memory_is_measured_as_memory(monkeypatch):
    monkeypatch.setattr(folders, "read_host_memory", lambda: SimpleNamespace(usable_bytes=10 * MIB))
    config = stored(TMPFS, far_gib=0, expansion=3)
    check_folders(config, engine(2 * MIB))
    with pytest.raises(BudgetError, match=r"10\.00 MiB are free in a file system that is memory"):
        check_folders(config, engine(64 * MIB))


@pytest.mark.parametrize("expansion", [1.5, 2, 3, 6])
@pytest.mark.parametrize("far_gib", [0, 0.0625])
@pytest.mark.parametrize("policy", ["interleave", "blocks"])
def test_the_estimate_never_exceeds_what_the_engine_makes(expansion, far_gib, policy):
    kv = KvConfig(tier="storage", path="/x", far_gib=far_gib, expansion=expansion, policy=policy)
    page_bytes, near_pages = 24 * 1024, 2730
    num_far = folders.resolve_num_far(kv, LayerStack(NUM_LAYERS))
    assert num_far
    geometry = KvGeometry(
        num_layers=NUM_LAYERS,
        num_resident=NUM_LAYERS - num_far,
        num_staging_buffers=2,
        page_bytes=page_bytes,
        block_tokens=32,
        near_pages=near_pages,
    )
    region_bytes = (fixed_limit(kv, geometry) + 1) * page_bytes
    real = (num_far - min(num_far, int(far_gib * GIB) // region_bytes)) * region_bytes
    estimate = least_file_bytes(kv, LayerStack(NUM_LAYERS), near_pages * page_bytes, 1)
    # Far memory may hold two regions less, and a tenth less of its bytes.
    certain = 0.85 * real - 0.15 * far_gib * GIB - 2 * region_bytes
    assert certain <= estimate <= real


@pytest.mark.skipif(not TMPFS.is_dir(), reason="no tmpfs")
def test_a_kv_file_in_memory_is_warned_of_with_its_size(caplog_vllm):
    worker._warn_if_memory(TMPFS, 3 * GIB)
    worker._warn_if_memory(TMPFS, 0)
    (message,) = caplog_vllm.messages
    assert "kv.path /dev/shm" in message and "its 3.00 GiB of KV take RAM" in message


def test_a_neuron_store_is_looked_at(tmp_path):
    folder = written(tmp_path / "store", SMALL, has_gates=True)
    config = TieredConfig.from_dict({"ffn": {"store": str(folder)}})
    check_folders(config, engine())
    os.truncate(folder / "neurons.bin", 8192)
    with pytest.raises(IntegrityError, match="has 8192 bytes instead"):
        check_folders(config, engine())
    with pytest.raises(ConfigError, match="is no neuron store"):
        check_folders(TieredConfig.from_dict({"ffn": {"store": "/nowhere"}}), engine())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent/t.jsonl", "absent does not exist"),
        ("thesis", "no timeline and would be lost"),
        ("folder", "not a regular file"),
    ],
)
def test_the_timeline_is_looked_at(tmp_path, name, says):
    (tmp_path / "thesis").write_text("my thesis\n")
    (tmp_path / "folder").mkdir()
    report = {"path": str(tmp_path / name)}
    with pytest.raises(ConfigError, match=rf"tiered\.report\.path is .*{says}"):
        check_folders(TieredConfig.from_dict({"report": report}), engine())
    # Without KV swapping no timeline is written.
    check_folders(TieredConfig.from_dict({"kv": {"enabled": False}, "report": report}), engine())
    good = {"path": str(tmp_path / "t.jsonl")}
    check_folders(TieredConfig.from_dict({"report": good}), engine())
    assert not (tmp_path / "t.jsonl").exists()


def as_nobody(action):
    """Run an action without the rights of root, who is let in everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        return action()
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("closed", ["grandparent", "t.jsonl", "t.jsonl.1"])
def test_a_timeline_that_cannot_be_looked_at_is_refused_by_its_key(closed):
    # A folder of pytest is below one that is closed to others.
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        folder = top / "grandparent" / "parent"
        folder.mkdir(parents=True)
        for path in (top, folder.parent, folder):
            path.chmod(0o777)
        for file in (folder / "t.jsonl", folder / "t.jsonl.1"):
            file.write_text(f'{{"format": "{FORMAT}"}}\n')
            file.chmod(0o666)
        where = folder.parent if closed == "grandparent" else folder / closed
        if os.geteuid() == 0:
            os.chown(where, 65534, -1)
        # Written to, but not read: the first line is not known.
        where.chmod(0 if closed == "grandparent" else 0o200)
        report = {"path": str(folder / "t.jsonl")}
        config = TieredConfig.from_dict({"report": report})
        says = r"tiered\.report\.path is .* cannot be looked at \(Permission denied\)"
        with pytest.raises(ConfigError, match=says):
            as_nobody(lambda: check_folders(config, engine()))
        where.chmod(0o700)


def test_an_engine_is_not_configured_with_such_a_folder(make_engine_args, tmp_path):
    tiered = {"kv": {"tier": "storage", "path": str(tmp_path / "no")}}
    with pytest.raises(ConfigError, match=r"kv\.path is .*no file can be made there"):
        make_engine_args(additional_config={"tiered": tiered}).create_engine_config()


def weights_in(path):
    weights = {"placement": "all_far", "storage_path": str(path)}
    return TieredConfig.from_dict({"weights": weights, "kv": {"enabled": False}})


def denied(monkeypatch, path, mode):
    """Let a permission be missing; root, who may run the tests, lacks none."""
    monkeypatch.setattr(
        folders.os, "access", lambda asked, wanted: asked != path or not wanted & mode
    )


def test_a_weights_folder_is_made_later(tmp_path):
    check_folders(weights_in(tmp_path / "new" / "one"), engine())
    assert list(tmp_path.iterdir()) == []


def test_a_weights_folder_below_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "folder"):
        with pytest.raises(ConfigError, match=r"weights\.storage_path is .*file is no folder\)"):
            check_folders(weights_in(path), engine())


def test_an_unwritable_weights_folder_is_refused_unless_it_is_filled(monkeypatch, tmp_path):
    denied(monkeypatch, tmp_path, os.W_OK)
    for path in (tmp_path, tmp_path / "new"):
        with pytest.raises(ConfigError, match=r"no file can be made in .*give a writable folder"):
            check_folders(weights_in(path), engine())
    filled = tmp_path / "rank0of1.weights"
    filled.touch()
    check_folders(weights_in(tmp_path), engine())
    denied(monkeypatch, filled, os.R_OK)
    with pytest.raises(ConfigError, match=r"rank0of1\.weights there cannot be read"):
        check_folders(weights_in(tmp_path), engine())


def test_a_closed_folder_is_refused(monkeypatch, tmp_path):
    def no_glob(self, pattern):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "glob", no_glob)
    with pytest.raises(ConfigError, match=r"cannot be looked into \(Permission denied\)"):
        check_folders(weights_in(tmp_path), engine())
    monkeypatch.undo()
    denied(monkeypatch, tmp_path, os.X_OK)
    report = TieredConfig.from_dict({"report": {"path": str(tmp_path / "timeline")}})
    with pytest.raises(ConfigError, match="cannot be written: set it to a file in a writable"):
        check_folders(report, engine())
