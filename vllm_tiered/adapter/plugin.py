# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM loads in every process (group `vllm.general_plugins`, name `tiered`).

vLLM logs a plugin whose import fails and carries on without it; what the function raises stops
vLLM. So this module imports nothing at its top, and `register` raises.
"""


def register() -> None:
    """Install the hooks that let a user switch vllm-tiered on; without that they pass through.

    Idempotent: vLLM may call it more than once per process. Raises VersionError if this vLLM is not
    the supported one or lacks what the hooks attach to.
    """
    from vllm_tiered.adapter import cli_args, compat
    from vllm_tiered.adapter import config as engine_config
    from vllm_tiered.adapter import worker_hooks as weights_engine
    from vllm_tiered.adapter.kv import cache_config as kv_config
    from vllm_tiered.adapter.kv import load_errors
    from vllm_tiered.adapter.telemetry import endpoint

    compat.check_vllm_version()
    cli_args.install()
    engine_config.install()
    endpoint.install()
    kv_config.install()
    load_errors.install()
    weights_engine.install()
