# SPDX-License-Identifier: Apache-2.0
"""Reference of the conversion of pages in plain torch: what kernels and C++ must give bit by bit.

The format is described in ``devices/page_format.py``. P pages, E elements, G groups of S elements.
"""

import torch

_INFINITY = 0x7F800000
_SMALLEST = 0x0D800000  # 2^-100
_NANS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def encode_pages(
    near_PE: torch.Tensor,
    near_ids: torch.Tensor,
    far_PB: torch.Tensor,
    far_ids: torch.Tensor,
    *,
    code: str,
    group: int,
    inverse_limit: float,
    largest_scale: int,
) -> None:
    """Write near pages ``near_ids[i]`` as narrow pages ``far_ids[i]``.

    Args:
        near_PE: float32, bfloat16 or float16.
        far_PB: uint8; E codes, then 2 bytes for each group's scale, then zeros.
        code: "int8" or "fp8".
        group: elements of a group (S).
        inverse_limit, largest_scale: as in ``PageFormat``.
    """
    x_PE = near_PE[near_ids].to(torch.float32)
    num_pages, num_elements = x_PE.shape
    num_groups = -(-num_elements // group)
    x_PE = torch.nn.functional.pad(x_PE, (0, num_groups * group - num_elements))
    x_PGS = x_PE.view(num_pages, num_groups, group)
    rest_PGS = x_PGS.view(torch.int32) & 0x7FFFFFFF
    is_finite = rest_PGS < _INFINITY
    top_PG = torch.where(is_finite, rest_PGS, 0).amax(-1)
    scaled_PG = (top_PG.view(torch.float32) * inverse_limit).view(torch.int32)
    scale_PG = ((scaled_PG + 0x4000) >> 15).clamp(max=largest_scale)
    scale_PG = torch.where(top_PG >= _SMALLEST, scale_PG, 0)
    inverse_PG = 1.0 / (scale_PG << 15).view(torch.float32)
    inverse_PG = torch.where(scale_PG > 0, inverse_PG, 0.0)
    y_PGS = x_PGS * inverse_PG[..., None]
    if code == "int8":
        codes_PGS = torch.where(is_finite, y_PGS.round().clamp(-127, 127).nan_to_num(), -128)
        codes_PGS = codes_PGS.to(torch.int32) & 0xFF
    else:
        codes_PGS = _fp8_codes(y_PGS.clamp(-448, 448))
        codes_PGS = torch.where(is_finite, codes_PGS, 0x7F)
        codes_PGS = codes_PGS | (x_PGS.view(torch.int32) >> 24) & 0x80
    codes_PE = codes_PGS.to(torch.uint8).view(num_pages, -1)[:, :num_elements]
    scales_PB = torch.stack([scale_PG & 0xFF, scale_PG >> 8], -1).to(torch.uint8)
    narrow_PB = torch.cat([codes_PE, scales_PB.view(num_pages, -1)], 1)
    padding = far_PB.shape[1] - narrow_PB.shape[1]
    far_PB[far_ids] = torch.nn.functional.pad(narrow_PB, (0, padding))


def decode_pages(
    far_PB: torch.Tensor,
    far_ids: torch.Tensor,
    near_PE: torch.Tensor,
    near_ids: torch.Tensor,
    *,
    code: str,
    group: int,
) -> None:
    """Write what narrow pages ``far_ids[i]`` hold to near pages ``near_ids[i]``; see above."""
    num_elements = near_PE.shape[1]
    num_groups = -(-num_elements // group)
    narrow_PB = far_PB[far_ids].to(torch.int32)
    codes_PE = narrow_PB[:, :num_elements]
    scales_PB = narrow_PB[:, num_elements : num_elements + 2 * num_groups]
    scale_PG = ((scales_PB[:, ::2] | scales_PB[:, 1::2] << 8) << 15).view(torch.float32)
    scale_PE = scale_PG.repeat_interleave(group, 1)[:, :num_elements]
    if code == "int8":
        signed_PE = codes_PE - ((codes_PE & 0x80) << 1)
        x_PE, is_nan = signed_PE.to(torch.float32) * scale_PE, codes_PE == 0x80
    else:
        x_PE, is_nan = _fp8_values(codes_PE) * scale_PE, (codes_PE & 0x7F) == 0x7F
    integer = torch.int32 if near_PE.dtype == torch.float32 else torch.int16
    bits_PE = x_PE.to(near_PE.dtype).view(integer)
    # torch has more than one NaN to convert to.
    bits_PE = torch.where(is_nan, _NANS[near_PE.dtype], bits_PE)
    near_PE[near_ids] = bits_PE.view(near_PE.dtype)


def _fp8_codes(y: torch.Tensor) -> torch.Tensor:
    """Return the codes of magnitudes up to 448, rounded to even, without their signs."""
    rest = y.view(torch.int32) & 0x7FFFFFFF
    small = (rest.view(torch.float32) + 16384.0).view(torch.int32) - 0x46800000
    large = ((rest + 0x7FFFF + (rest >> 20 & 1)) >> 20) - (120 << 3)
    return torch.where(rest < 0x3C800000, small, large)


def _fp8_values(codes: torch.Tensor) -> torch.Tensor:
    rest = codes & 0x7F
    small = rest.to(torch.float32) * 2.0**-9
    large = ((rest << 20) + (120 << 23)).view(torch.float32)
    value = torch.where(rest < 8, small, large)
    return torch.where((codes & 0x80) > 0, -value, value)
