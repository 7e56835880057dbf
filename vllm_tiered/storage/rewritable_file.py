# SPDX-License-Identifier: Apache-2.0
"""Immutable file that is set aside when a page of it is lost, so that the next start fills it anew.

Otherwise an engine that dies of a damaged page would die of it again at each start.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_tiered.devices.pages import PageIds
from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.storage.immutable_file import ImmutableFile
from vllm_tiered.storage.reader import PendingRead

logger = logging.getLogger("vllm.tiered")


class RewritableFile(ImmutableFile):
    """Published file that is renamed when a page of it is lost."""

    is_cancelled = False

    def _end_read(self, pending: PendingRead) -> PageIds:
        try:
            return super()._end_read(pending)
        except IntegrityError as error:
            if self.is_cancelled or not set_aside(self.path):
                raise
            raise IntegrityError(
                f"{error}. It is now {aside(self.path).name}: start the engine again"
            ) from error

    def cancel(self) -> None:
        self.is_cancelled = True
        super().cancel()


def open_of_model(
    path: Path, model: Mapping[str, str], describe: Callable[[int], str], *, part: str
) -> RewritableFile | None:
    """Open the file that an earlier start has filled for a model.

    Args:
        path: the file.
        model: identity of the weights: ``name``, ``fingerprint``, and ``changed`` (time of change).
        describe: names the owner of a page, for messages.
        part: the configuration section with the folder, for messages: "weights" or "experts".

    Returns:
        None if there is no file, or a damaged one, which is set aside.

    Raises:
        ConfigError: the file holds another model's weights, has another version, or is unreadable.
        IntegrityError: the file is damaged, and cannot be set aside.
    """
    try:
        file = RewritableFile(path, describe)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IntegrityError as error:
        if not set_aside(path):
            raise
        logger.warning("tiered %s: the file is filled anew: %s", part, error)
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    other = file.contents["model"]
    if other["fingerprint"] != model["fingerprint"]:
        file.close()
        raise ConfigError(
            f"{path} holds {part} of {_name(other)}, and this model is {_name(model)}: "
            f"give another {part}.storage_path, or remove the file"
        )
    return file


def _name(model: Mapping[str, str]) -> str:
    return f"{model['name']} (fingerprint {model['fingerprint'][:12]})"


def aside(path: Path) -> Path:
    """Return the name that a damaged file gets."""
    return path.with_name(f"{path.name}.damaged")


def set_aside(path: Path) -> bool:
    """Rename a damaged file, so that the next start does not read it; return whether it worked."""
    try:
        os.replace(path, aside(path))
    except FileNotFoundError:
        return aside(path).exists()  # another read of the same file was first
    except OSError:
        return False
    logger.error("tiered: %s is damaged and was renamed to %s", path, aside(path).name)
    return True
