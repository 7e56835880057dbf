# SPDX-License-Identifier: Apache-2.0
"""Policies that say which experts leave their slots first.

A window of recent use is what LLM in a flash keeps (section 3.1); here its length is the slots'.
"""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Experts = npt.NDArray[np.int64]
Keys = npt.NDArray[np.int32]

HALF_LIFE = 128
"""Steps after which a use counts half with ``lfu``."""


class EvictionPolicy(ABC):
    """Order in which experts leave a layer's slots.

    Args:
        num_experts: number of the layer's experts.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    @abstractmethod
    def use(self, experts: Experts) -> None:
        """Record that a step used these experts, each once."""

    @abstractmethod
    def order(self, experts: Experts) -> Experts:
        """Return the experts in the order in which they leave; ties by number."""


class KeyedPolicy(EvictionPolicy):
    """Policy with a number for each expert, so that a GPU can follow it.

    Attributes:
        decay: factor by which a use counts less after a step; None if uses are not counted.
    """

    decay: float | None = None

    @property
    @abstractmethod
    def keys(self) -> Keys:
        """Keys of all experts, int32: the smallest leaves first. No key is negative."""

    @keys.setter
    @abstractmethod
    def keys(self, keys: Keys) -> None: ...


class Lru(KeyedPolicy):
    """The expert that was not used for longest leaves first."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self._now = 0
        self._last_use = np.zeros(num_experts, dtype=np.int64)

    def use(self, experts: Experts) -> None:
        self._now += 1
        self._last_use[experts] = self._now

    @property
    def keys(self) -> Keys:
        return self._last_use.astype(np.int32)

    @keys.setter
    def keys(self, keys: Keys) -> None:
        self._last_use[:] = keys
        self._now = int(keys.max())

    def order(self, experts: Experts) -> Experts:
        return experts[np.argsort(self._last_use[experts], kind="stable")]


class Lfu(KeyedPolicy):
    """The expert that was used least often leaves first; a use counts half after 128 steps."""

    def __init__(self, num_experts: int, half_life: float = HALF_LIFE) -> None:
        super().__init__(num_experts)
        self._uses = np.zeros(num_experts)
        self.decay: float = 0.5 ** (1 / half_life)

    def use(self, experts: Experts) -> None:
        self._uses *= self.decay
        self._uses[experts] += 1

    @property
    def keys(self) -> Keys:
        """Bits of the uses in float32, which have the order of the numbers."""
        return self._uses.astype(np.float32).view(np.int32)

    @keys.setter
    def keys(self, keys: Keys) -> None:
        self._uses[:] = keys.view(np.float32)

    def order(self, experts: Experts) -> Experts:
        return experts[np.argsort(self._uses[experts], kind="stable")]


POLICIES: dict[str, type[KeyedPolicy]] = {"lru": Lru, "lfu": Lfu}
