# SPDX-License-Identifier: Apache-2.0
"""The errors that vllm-tiered raises on purpose.

    Exception
    └── TieredError
        ├── ConfigError       (+ ValueError)    a key or a value of the configuration is wrong
        ├── UnsupportedError  (+ ValueError)    a combination refused at start
        ├── BudgetError       (+ ValueError)    a tier is too small for what it has to hold
        ├── VersionError      (+ RuntimeError)  not the vLLM this adapter was written for
        └── IntegrityError    (+ RuntimeError)  an internal count does not add up: a bug here

A message says what is wrong, with the actual numbers, and which knob to turn.
"""


class TieredError(Exception):
    """Root of the tree; catching it catches every error that vllm-tiered raises on purpose."""


class ConfigError(TieredError, ValueError):
    """A configuration key is unknown, or its value has the wrong type or lies out of range."""


class UnsupportedError(TieredError, ValueError):
    """The model, the platform or another option is incompatible with what was switched on."""


class BudgetError(TieredError, ValueError):
    """A tier's byte budget is too small for what it must hold."""


class VersionError(TieredError, RuntimeError):
    """vLLM's version, or one of the extension points the adapter relies on, does not match."""


class IntegrityError(TieredError, RuntimeError):
    """An internal count does not add up; the state can no longer be trusted."""
