# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in every process (group `vllm.general_plugins`, name `tiered`).

vLLM logs a plugin whose import fails and carries on without it; an exception raised by the function
stops vLLM. So this module imports nothing at its top, and `register` raises.
"""


def register() -> None:
    """Install the hooks that let a user switch vllm-tiered on; until then they pass calls through.

    Idempotent: vLLM may call it more than once per process.

    Raises:
        VersionError: this vLLM is not a supported one, or cannot be switched on in. What else does
            not fit is said when an engine switches the plugin on; others run undisturbed.
    """
    from vllm_tiered.adapter import cli_args, compat, engine_config, extension_points, worker_hooks
    from vllm_tiered.adapter.kv import cache_config, load_errors
    from vllm_tiered.adapter.telemetry import endpoint
    from vllm_tiered.errors import VersionError

    compat.check_vllm_version()
    cli_args.install()
    engine_config.install()
    for module, needed_for in (
        (endpoint, "serving /tiered"),
        (cache_config, "sizing the block pool"),
        (load_errors, "recomputing requests whose far pages were lost"),
        (worker_hooks, "placing weights"),
    ):
        try:
            module.install()
        except VersionError as error:
            extension_points.postpone(needed_for, error)
