# SPDX-License-Identifier: Apache-2.0
"""Section `weights`: placement of the weights over mixed memory (FlexGen, HeLM, All-CPU)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_tiered.config.rules import MAX_GIB, Count, Number, Numbers, OneOf, PathTo
from vllm_tiered.config.section import Section, option
from vllm_tiered.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig(Section):
    """Placement of the layers' weights over mixed memory (FlexGen, HeLM, All-CPU)."""

    NAME: ClassVar[str] = "weights"

    placement: Literal["off", "flexgen", "helm", "all_far", "latency", "throughput", "auto"] = (
        option(
            "off",
            OneOf(words=("off", "flexgen", "helm", "all_far", "latency", "throughput", "auto")),
            "Which parameters of the layers stay near; the others are far, and arrive while the "
            'sublayer before theirs computes. `"off"` leaves the weights to vLLM. `"flexgen"` '
            'splits them by `percents`. `"helm"` keeps all but the large matrices near, and of '
            'those the first one of the FFN. `"all_far"` keeps none. `"latency"` keeps those '
            "that make a step shortest within `near_gib`, from times measured at start. "
            '`"throughput"` shares `near_gib` between weights and KV cache so that most tokens '
            'are served. `"auto"` plans for latency and for throughput and takes the plan for '
            "vLLM's performance mode.",
        )
    )
    near_gib: float | Literal["auto"] = option(
        "auto",
        Number(at_least=0, at_most=MAX_GIB, auto=True),
        "Cap on the near memory, in GiB, that a rank's weights take, weight buffers included. "
        '`"auto"` gives the placement what it needs. With `placement` `"throughput"` and '
        '`"auto"` it is required, and covers the layers and the KV cache of a rank together.',
    )
    far_gib: float | Literal["auto"] = option(
        "auto",
        Number(at_least=0, at_most=MAX_GIB, auto=True),
        "Cap on the far memory, in GiB, that a rank's weights take. What exceeds it is kept in "
        'the folder `storage_path`. `"auto"` gives the placement what it needs, or, with a '
        "`storage_path`, half of the available host memory.",
    )
    storage_path: str | None = option(
        None,
        PathTo(what="folder"),
        "Folder, on an SSD, of the file with the weights that `far_gib` does not hold. The first "
        "start fills the file, later starts read it.",
    )
    compress: Literal["none", "int4"] = option(
        "none",
        OneOf(words=("none", "int4")),
        '`"int4"` keeps the matrices of the layers, near ones too, in 4 bit, quantized in groups '
        'of 32. `"none"` keeps the data type of the checkpoint.',
    )
    percents: tuple[float, ...] | None = option(
        None,
        Numbers(),
        'Shares of near, far and storage in percent; required by `placement` `"flexgen"`, and '
        "read by no other.",
    )
    prompt_tokens: int | Literal["auto"] = option(
        "auto",
        Count(at_most=1 << 30, auto=True),
        'Prompt tokens of the requests that `placement` `"throughput"` and `"auto"` plan for; '
        'the rest of `--max-model-len` is generated. `"auto"` is half of it.',
    )

    @property
    def places(self) -> bool:
        """Whether any weight may leave the near tier."""
        return self.placement != "off"

    @property
    def shares_with_kv(self) -> bool:
        """Whether `near_gib` covers the KV cache too."""
        return self.placement in ("throughput", "auto")

    def check(self) -> None:
        """Check that the keys go together.

        Raises:
            ConfigError: naming the keys that do not.
        """
        self._check_placed()
        self._check_near_budget()
        self._check_percents()
        if self.prompt_tokens != "auto" and not self.shares_with_kv:
            where = self.full_key("")
            raise ConfigError(
                f'{where}prompt_tokens is {self.prompt_tokens}, and placement "{self.placement}" '
                f'plans for no prompts: set {where}placement to "throughput" or "auto", or leave '
                "prompt_tokens out"
            )

    def _check_placed(self) -> None:
        """Check that nothing is configured for weights that stay with vLLM."""
        if self.places:
            return
        where = self.full_key("")
        for key in ("near_gib", "far_gib"):
            if getattr(self, key) != "auto":
                raise ConfigError(
                    f"{where}{key} is {getattr(self, key):g}, but no weight is placed: set "
                    f"{where}placement, or leave {key} out"
                )
        if self.storage_path is not None:
            raise ConfigError(
                f"{where}storage_path is {self.storage_path!r}, but no weight is placed: set "
                f"{where}placement, or leave the path out"
            )
        if self.compress != "none":
            raise ConfigError(
                f'{where}compress is "{self.compress}", but weights are left to vLLM: set '
                f'{where}placement (with "helm" or "all_far" in far memory), or leave compress out'
            )

    def _check_near_budget(self) -> None:
        where = self.full_key("")
        if self.placement == "latency" and self.near_gib == "auto":
            raise ConfigError(
                f'{where}placement is "latency": set {where}near_gib to the near memory, in GiB, '
                "that the layers may take"
            )
        if self.shares_with_kv and self.near_gib == "auto":
            raise ConfigError(
                f'{where}placement is "{self.placement}": set {where}near_gib to the near '
                "memory, in GiB, that the layers and the KV cache of a rank have together"
            )

    def _check_percents(self) -> None:
        where = self.full_key("")
        is_flexgen = self.placement == "flexgen"
        if is_flexgen and self.percents is None:
            raise ConfigError(
                f'{where}placement is "flexgen": set {where}percents to the shares of near, far '
                "and storage, as [20, 80, 0]"
            )
        if not is_flexgen and self.percents is not None:
            raise ConfigError(
                f"{where}percents is {list(self.percents)}, which only the placement "
                f'"flexgen" reads: set {where}placement to it, or leave percents out'
            )
        if self.percents is not None and self.percents[2:] > (0,) and self.storage_path is None:
            raise ConfigError(
                f"{where}percents is {list(self.percents)}, and the third is the share of "
                f"storage: set {where}storage_path to a folder on an SSD"
            )
