# SPDX-License-Identifier: Apache-2.0
"""Cache folder of prepared inputs, with atomic publication.

`VLLM_TIERED_CACHE` names the folder. Without it `.cache/` in the repository root is used, which git
ignores.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the cache folder (created if absent): the argument, the environment, `.cache/`."""
    root = Path(cache_dir or os.environ.get("VLLM_TIERED_CACHE") or REPO_ROOT / ".cache").absolute()
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextmanager
def publish_dir(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target` that becomes `target` by one rename on success.

    On an exception the folder is removed and `target` stays as it was. If another process publishes
    `target` first, that copy is kept and ours is dropped: both hold the same bytes.
    """
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staging
        # mkdtemp and safetensors make files private to the owner; users may share a cache.
        staging.chmod(0o755)
        for file in staging.iterdir():
            file.chmod(0o644)
        try:
            staging.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_atomic(target: Path, text: str) -> None:
    """Write `text` to `target` so that a reader sees the whole new file or the old one."""
    handle, staging = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(staging).chmod(0o644)
        Path(staging).replace(target)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise
