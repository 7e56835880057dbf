# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads when it looks for its platform (group `vllm.platform_plugins`).

vllm-tiered brings no platform. This group is loaded before the `vllm` command reads its flags and
before vLLM looks for optional kernels; the general plugins are loaded after both. What has to be
there by then is done here.

vLLM loads platform plugins in every process, unless VLLM_PLUGINS leaves them out or
VLLM_TARGET_DEVICE is `cpu`, and hides what they raise. So this module imports the standard library
alone at its top, and whatever has to stop vLLM belongs in `plugin.register`.
"""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

GROUP = "vllm.platform_plugins"
NAME = "tiered"
VLLM_KERNELS = "triton_kernels"


def register() -> None:
    """Answer that this is no platform; before that, let the command start and hide our kernels.

    Idempotent, and without effect where vLLM needs neither.
    """
    from vllm_tiered.adapter import distribution

    distribution.install()
    hide_kernels_folder()


def is_kept_out() -> bool:
    """Return whether the environment, or an installation without the entry point, leaves it out."""
    plugins = os.environ.get("VLLM_PLUGINS")
    return (
        (plugins is not None and NAME not in plugins.split(","))
        or os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu"
        or not importlib.metadata.entry_points(group=GROUP, name=NAME)
    )


def hide_kernels_folder() -> None:
    """Keep vLLM from taking the folder `triton_kernels/` of our repository for its MXFP4 kernels.

    The folder is importable under that name when vLLM starts in the repository's root
    (`python -m ...`). Its import fails on purpose, and vLLM would log the failure with a traceback.
    With None in `sys.modules` there is no such module, and vLLM falls back to its own copy. Another
    module of that name, installed or already imported, is left alone.
    """
    if VLLM_KERNELS in sys.modules:
        return
    spec = importlib.util.find_spec(VLLM_KERNELS)
    if spec is None or not spec.has_location or spec.origin is None:
        return
    # Not compared with the installed vllm_tiered.kernels: that may come from another checkout.
    if b"vllm_tiered.kernels" in Path(spec.origin).read_bytes():
        sys.modules[VLLM_KERNELS] = None  # type: ignore[assignment]
