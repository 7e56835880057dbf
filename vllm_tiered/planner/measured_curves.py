# SPDX-License-Identifier: Apache-2.0
"""Measured times of a machine, which one bandwidth and one throughput cannot express."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Seconds of a GEMM by the weight's bytes and the number of activation rows.

    Attributes:
        rows: the measured numbers of rows, ascending.
        by_rows: for each number of rows, (bytes, seconds) of each weight, by ascending bytes.
    """

    rows: tuple[int, ...]
    by_rows: tuple[tuple[tuple[int, float], ...], ...]

    @classmethod
    def of(cls, seconds: Mapping[tuple[int, int], float]) -> GemmCurve:
        """Build a curve from a mapping of (rows, bytes) to seconds."""
        rows = tuple(sorted({rows for rows, _ in seconds}))
        by_rows = tuple(
            tuple(sorted((size, value) for (at, size), value in seconds.items() if at == number))
            for number in rows
        )
        return cls(rows, by_rows)

    @property
    def points(self) -> dict[tuple[int, int], float]:
        """Measured seconds by (rows, bytes), sorted."""
        return {
            (rows, num_bytes): seconds
            for rows, points in zip(self.rows, self.by_rows, strict=True)
            for num_bytes, seconds in points
        }

    def seconds(self, num_bytes: int, rows: int) -> float:
        """Interpolate between measured points, and extrapolate proportionally; 0 bytes take 0 s."""
        if not num_bytes:
            return 0.0
        times = [_at(curve, num_bytes) for curve in self.by_rows]
        if rows > self.rows[-1]:
            return times[-1] * rows / self.rows[-1]
        return float(np.interp(rows, self.rows, times))


def _at(curve: tuple[tuple[int, float], ...], num_bytes: int) -> float:
    largest, seconds = curve[-1]
    if num_bytes > largest:
        return seconds * num_bytes / largest
    sizes, times = zip((0, 0.0), *curve, strict=True)
    return float(np.interp(num_bytes, sizes, times))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredAttention:
    """Measured costs of attention and of other work on a layer's activations.

    Attributes:
        request_us: what each request adds to a layer's attention, apart from its tokens.
        decode_kv_gb_per_s: rate of attention's reads of the KV cache for one new token of each
            request.
        decode_gflops: rate of its arithmetic, which follows the reads.
        prompt_gflops: the same for many new tokens, where reads take no time of their own.
        row_ns_per_feature: what a token adds to a layer outside GEMMs and attention, for each of
            the in and out features of the layer's GEMMs.
    """

    request_us: float
    decode_kv_gb_per_s: float
    decode_gflops: float
    prompt_gflops: float
    row_ns_per_feature: float

    def seconds(
        self, operations: float, kv_bytes: float, requests: int, *, is_decode: bool
    ) -> float:
        """Return the seconds of a layer's attention for so many requests.

        Args:
            operations: arithmetic operations of all of them.
            kv_bytes: bytes that it reads of their KV cache.
            requests: number of requests.
            is_decode: each has one new token.
        """
        rest = requests * self.request_us * 1e-6
        if not is_decode:
            return operations / (self.prompt_gflops * 1e9) + rest
        reads = kv_bytes / (self.decode_kv_gb_per_s * 1e9)
        return reads + operations / (self.decode_gflops * 1e9) + rest


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCurves:
    """Measured curves of a machine, which replace some of its single figures.

    Attributes:
        near: GEMMs with resident weights.
        far: GEMMs with weights in a weight buffer.
        compute_slowdown, link_slowdown: factors by which compute and a transfer slow down while
            both run.
        layer_overhead_us: time of a layer's calls in a step, without its GEMMs.
        storage_slowdown: the same two factors of reads from storage; None if they were not
            measured.
        compressed: GEMMs with our weights in 4 bit, by the bytes that the weights have without
            compression. None if they were not measured; they are then assumed to take as long as
            without compression.
        w4a16: likewise, with the weights of checkpoints in 4 bit.
        attention: measured attention; None if it is predicted by bytes and operations.
    """

    near: GemmCurve
    far: GemmCurve
    compute_slowdown: float
    link_slowdown: float
    layer_overhead_us: float
    compressed: GemmCurve | None = None
    w4a16: GemmCurve | None = None
    attention: MeasuredAttention | None = None
    storage_slowdown: tuple[float, float] | None = None

    def near_bytes_per_copied_byte(self, near_gb_per_s: float, read_gb_per_s: float) -> float:
        """Return the bytes of near-memory traffic that compute loses for each copied byte.

        They are the bytes that compute would have read in the time that it loses.

        Args:
            near_gb_per_s: rate of compute without copies.
            read_gb_per_s: rate of copies without compute.
        """
        lost = (1 - 1 / self.compute_slowdown) * near_gb_per_s
        return lost * self.link_slowdown / read_gb_per_s
