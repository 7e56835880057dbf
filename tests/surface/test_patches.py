# SPDX-License-Identifier: Apache-2.0
"""The patches of patches/ apply to the installed vLLM, and the ledger accounts for each."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_tiered.adapter.compat import SUPPORTED_VLLM, vllm_version

PATCHES = Path(__file__).resolve().parents[2] / "patches"
ALL_SERIES = [PATCHES / f"vllm-{release}" for release in SUPPORTED_VLLM]
SERIES = PATCHES / f"vllm-{'.'.join((vllm_version() or '').split('.')[:2])}"
PARTS = ("Why", "How", "Remove when")


def patch_files(series: Path = SERIES) -> list[Path]:
    return sorted(series.glob("*.patch"))


def touched(patch: str) -> set[str]:
    """The existing files that a patch changes, as paths below the directory that holds vllm/."""
    return set(re.findall(r"^--- a/(\S+)", patch, flags=re.MULTILINE))


def ledger_entries(ledger: str) -> dict[str, str]:
    """Patch name -> text of its entry, for every heading that names a patch."""
    heading = r"^#+ `?([\w.-]+\.patch)`?\s*$"
    parts = re.split(heading, ledger, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def missing_parts(entry: str) -> list[str]:
    return [part for part in PARTS if not re.search(rf"\*\*{part}\.\*\*\s+\w", entry)]


def git_apply(patch: Path, tree: Path) -> None:
    # The ceiling keeps git from finding a repository above, where it would skip files in silence.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run(
        ["git", "apply", "-p1", str(patch)],
        cwd=tree,
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def vllm_copy(tmp_path):
    """A directory with copies of just the files of the installed vLLM that the series touches."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent.parent
    for name in set().union(*(touched(path.read_text()) for path in patch_files())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed / name, tmp_path / name)
    return tmp_path


def test_each_supported_release_has_a_series():
    assert sorted(path for path in PATCHES.iterdir() if path.is_dir()) == ALL_SERIES


@pytest.mark.parametrize("series", ALL_SERIES, ids=lambda path: path.name)
def test_a_series_is_numbered(series):
    assert patch_files(series), "no patches: delete the directory and this test with it"
    numbers = [path.name[:5] for path in patch_files(series)]
    assert numbers == [f"{index:04}-" for index in range(1, len(numbers) + 1)]


def test_the_series_applies_in_order(vllm_copy):
    for patch in patch_files():
        names = touched(patch.read_text())
        assert names, f"{patch.name} changes no file of vLLM"
        before = {name: (vllm_copy / name).read_text() for name in names}
        git_apply(patch, vllm_copy)
        for name in names:
            after = (vllm_copy / name).read_text()
            assert after != before[name], f"{patch.name} left {name} as it was"
            compile(after, name, "exec")


def test_a_patch_that_does_not_fit_is_noticed(tmp_path):
    (tmp_path / "vllm.py").write_text("one\n")
    patch = tmp_path / "0001-x.patch"
    patch.write_text("--- a/vllm.py\n+++ b/vllm.py\n@@ -1 +1 @@\n-two\n+three\n")
    with pytest.raises(subprocess.CalledProcessError):
        git_apply(patch, tmp_path)


def test_the_ledger_accounts_for_each_patch():
    entries = ledger_entries((PATCHES / "README.md").read_text())
    assert set(entries) == {path.name for series in ALL_SERIES for path in patch_files(series)}
    gaps = {name: missing_parts(entry) for name, entry in entries.items()}
    assert not any(gaps.values()), gaps


def test_a_gap_in_the_ledger_is_noticed():
    ledger = (
        "### `0001-a.patch`\n\n**Why.** Text.\n\n**How.** Text.\n\n"
        "**Remove when.** Text.\n\n"
        "### 0002-b.patch\n\n**Why.**\n\n**Remove when.** Text.\n"
    )
    entries = ledger_entries(ledger)
    assert list(entries) == ["0001-a.patch", "0002-b.patch"]
    assert [missing_parts(entry) for entry in entries.values()] == [[], ["Why", "How"]]
