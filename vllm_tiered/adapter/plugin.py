# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in every process (group `vllm.general_plugins`, name `tiered`).

vLLM logs a plugin whose import fails and carries on without it; an exception raised by the function
stops vLLM. So this module imports nothing at its top, and `register` raises.
"""


def register() -> None:
    """Install the hooks that let a user switch vllm-tiered on; until then they pass calls through.

    Idempotent: vLLM may call it more than once per process.

    Raises:
        VersionError: this vLLM is not the supported one, or lacks what the hooks attach to.
    """
    from vllm_tiered.adapter import cli_args, compat, engine_config, worker_hooks
    from vllm_tiered.adapter.kv import cache_config, load_errors
    from vllm_tiered.adapter.telemetry import endpoint

    compat.check_vllm_version()
    cli_args.install()
    engine_config.install()
    endpoint.install()
    cache_config.install()
    load_errors.install()
    worker_hooks.install()
