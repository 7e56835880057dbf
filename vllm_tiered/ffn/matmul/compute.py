# SPDX-License-Identifier: Apache-2.0
"""The FFN's GEMM over the neurons of a cache buffer, computed in place.

    a_Bn   = act(x_BH gate_nH^T) * (x_BH up_nH^T)      gated; or act(x_BH up_nH^T + bias_n)
    out_BH += a_Bn down_nH                              rows of down are the neurons' columns

`act` is one of ``ffn.activation``'s that leave neurons inactive.

B tokens, H hidden, n neurons: slots 0 .. n-1 of a buffer. Later slots are never read. Sums are in
float32 for every dtype of weights. They depend on the number of threads, but not on their timing.

Triton kernels compute buffers on a GPU (``vllm_tiered.kernels.neuron_ffn``). The C++ library
computes all others, or plain torch if the library was not built.
"""

import ctypes
from dataclasses import dataclass
from types import ModuleType

import torch

from vllm_tiered import native
from vllm_tiered.ffn.activation import parse
from vllm_tiered.ffn.cache.buffer import NeuronCacheBuffer
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.matmul import reference

__all__ = [
    "Missing",
    "NeuronCacheBuffer",
    "activations",
    "add_down",
    "device_name",
    "ffn_output",
    "fill_and_add",
    "num_fills",
]


def activations(
    x_BH: torch.Tensor, buffer: NeuronCacheBuffer, num_slots: int, activation: str
) -> torch.Tensor:
    """Return the activations of the neurons in slots 0 .. num_slots - 1, float32 [B, n].

    Args:
        x_BH: the layer's input, of any float type.
        activation: a name of ``ffn.activation``.

    Raises:
        UnsupportedError: ``activation`` is unknown, or leaves no neuron inactive.
    """
    relu = _checked(x_BH, buffer, num_slots, activation)
    if (kernels := gpu_kernels(buffer)) is not None:
        found: torch.Tensor = kernels.compute_activations(
            _in_rows(x_BH), _bundles(buffer), num_slots, relu, device_name=device_name(buffer)
        )
        return found
    a_Bn = torch.empty((len(x_BH), num_slots), dtype=torch.float32)
    x_BH = _float32(x_BH)
    if not _run(buffer, num_slots, relu, x_BH, a_Bn, None):
        reference.activations(x_BH, buffer, a_Bn, activation)
    return a_Bn


def add_down(
    out_BH: torch.Tensor, a_Bn: torch.Tensor, buffer: NeuronCacheBuffer, num_slots: int
) -> None:
    """Add the down GEMM of slots 0 .. num_slots - 1 to ``out_BH``, float32 and contiguous.

    Slots whose activations are all 0 add nothing, even if they hold NaN. The C++ kernels and the
    GPU's few-tokens kernel do not read them.
    """
    assert a_Bn.shape == (len(out_BH), num_slots) and out_BH.shape[1] == buffer.shape.hidden
    assert out_BH.dtype == torch.float32 and out_BH.is_contiguous() and buffer.has_down
    if (kernels := gpu_kernels(buffer)) is not None:
        kernels.add_down_projection(
            out_BH,
            _in_rows(a_Bn.to(torch.float32)),
            _bundles(buffer),
            num_slots,
            device_name=device_name(buffer),
        )
        return
    a_Bn = _float32(a_Bn)
    if not _run(buffer, num_slots, (0.0, False), None, a_Bn, out_BH):
        reference.add_down(out_BH, a_Bn, buffer)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Missing:
    """Missing neurons, which a kernel loads into a buffer while it computes.

    Attributes:
        slab: uint8 [N, stride], pinned host memory: all of the layer's bundles.
        neuron_ids: int64 [m], near, the missing neurons, which index the slab.
        slot_ids: int64 [m], near, the slot of each missing neuron; -1 means that it is multiplied
            but not kept.
        retained_slot_ids: int64, near, the other slots of the buffer that are multiplied.
        counts: int32 [2], near, the valid entries of the lists of missing neurons and of retained
            slots.
        scales, up_bias: tables of all of the layer's neurons, with a buffer's dtypes.
    """

    slab: torch.Tensor
    neuron_ids: torch.Tensor
    slot_ids: torch.Tensor
    retained_slot_ids: torch.Tensor
    counts: torch.Tensor
    scales: torch.Tensor | None
    up_bias: torch.Tensor | None


def num_fills(buffer: NeuronCacheBuffer, num_tokens: int) -> int:
    """Return how many times :func:`fill_and_add` reads a missing neuron that has no slot."""
    kernels = gpu_kernels(buffer)
    assert kernels is not None
    found: int = kernels.num_passes(_bundles(buffer), num_tokens, device_name=device_name(buffer))
    return found


def fill_and_add(
    out_BH: torch.Tensor,
    x_BH: torch.Tensor,
    buffer: NeuronCacheBuffer,
    missing: Missing,
    activation: str,
) -> None:
    """Add the output of missing and retained neurons to ``out_BH``, and load the missing ones.

    Work that is submitted later finds the missing neurons in their slots. The buffer must be on a
    GPU.
    """
    kernels = gpu_kernels(buffer)
    assert kernels is not None
    from vllm_tiered.kernels.neuron_ffn import bundles

    out_BH += kernels.load_and_compute(
        _in_rows(x_BH),
        _bundles(buffer),
        bundles.Missing(
            slab=missing.slab,
            slab_ids=missing.neuron_ids,
            slot_ids=missing.slot_ids,
            neuron_ids=missing.neuron_ids,
            scales=missing.scales,
            up_bias=missing.up_bias,
        ),
        missing.retained_slot_ids,
        missing.counts,
        parse(activation),
        device_name=device_name(buffer),
    )


def ffn_output(
    x_BH: torch.Tensor, buffer: NeuronCacheBuffer, num_slots: int, activation: str
) -> torch.Tensor:
    """Return the FFN's output without the bias of fc2, float32 [B, H].

    Raises:
        UnsupportedError: ``activation`` is unknown, or leaves no neuron inactive.
    """
    relu = _checked(x_BH, buffer, num_slots, activation)
    assert buffer.has_down
    if (kernels := gpu_kernels(buffer)) is not None:
        found: torch.Tensor = kernels.compute_ffn(
            _in_rows(x_BH), _bundles(buffer), num_slots, relu, device_name=device_name(buffer)
        )
        return found
    x_BH = _float32(x_BH)
    out_BH = torch.zeros((len(x_BH), buffer.shape.hidden), dtype=torch.float32)
    a_Bn = torch.empty((len(x_BH), num_slots), dtype=torch.float32)
    if not _run(buffer, num_slots, relu, x_BH, a_Bn, out_BH):
        reference.activations(x_BH, buffer, a_Bn, activation)
        reference.add_down(out_BH, a_Bn, buffer)
    return out_BH


def gpu_kernels(buffer: NeuronCacheBuffer) -> ModuleType | None:
    """Return the module of the GPU kernels for a buffer; None if it is in host memory.

    The module is imported here because only a GPU needs Triton.
    """
    if buffer.bundles.device.type != "cuda":
        return None
    from vllm_tiered.kernels.neuron_ffn import api

    kernels: ModuleType = api
    return kernels


def _bundles(buffer: NeuronCacheBuffer) -> object:
    """Return a buffer as the argument of the kernels."""
    from vllm_tiered.kernels.neuron_ffn.bundles import Bundles

    return Bundles(
        slots=buffer.bundles,
        scales=buffer.scales,
        up_bias=buffer.up_bias,
        hidden=buffer.shape.hidden,
        gated=buffer.shape.gated,
        codec=_codec(buffer),
        has_down=buffer.has_down,
    )


def _codec(buffer: NeuronCacheBuffer) -> str:
    """Return the buffer's codec, one of ``native.CODECS``."""
    if buffer.precision is Precision.FULL:
        return str(buffer.dtype).removeprefix("torch.")
    codec: str = buffer.precision.value
    return codec


def device_name(buffer: NeuronCacheBuffer) -> str | None:
    """Return the name of the buffer's GPU, which selects launch parameters; None on the host."""
    if buffer.bundles.device.type != "cuda":
        return None
    return torch.cuda.get_device_name(buffer.bundles.device)


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows; copy it if necessary."""
    return x if x.stride(1) == 1 else x.contiguous()


def _checked(
    x_BH: torch.Tensor, buffer: NeuronCacheBuffer, num_slots: int, activation: str
) -> tuple[float, bool]:
    """Check the arguments, and return what the kernels need of the activation."""
    assert x_BH.shape[1] == buffer.shape.hidden and num_slots <= buffer.capacity
    return parse(activation)


def _float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()


def _run(
    buffer: NeuronCacheBuffer,
    num_slots: int,
    relu: tuple[float, bool],
    x_BH: torch.Tensor | None,
    a_Bn: torch.Tensor,
    out_BH: torch.Tensor | None,
) -> bool:
    """Run the C++ kernels; return False if none were built."""
    kernels = native.best()
    if kernels is None:
        return False
    if not a_Bn.numel():
        return True
    scales, bias = buffer.scales, buffer.up_bias
    call = native.Call(
        bundles=buffer.bundles.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        up_bias=None if bias is None else bias.data_ptr(),
        x=None if x_BH is None else x_BH.data_ptr(),
        activations=a_Bn.data_ptr(),
        out=None if out_BH is None else out_BH.data_ptr(),
        stride=buffer.bundles.stride(0),
        num_slots=num_slots,
        hidden=buffer.shape.hidden,
        num_matrices=buffer.shape.num_matrices,
        num_groups=0 if scales is None else scales.shape[2],
        num_tokens=len(a_Bn),
        codec=native.CODECS.index(_codec(buffer)),
        both=relu[1],
        num_threads=torch.get_num_threads(),
        threshold=relu[0],
    )
    if code := kernels.ffn(ctypes.byref(call)):
        raise MemoryError(f"the FFN's C++ kernels failed with code {code}")
    return True
