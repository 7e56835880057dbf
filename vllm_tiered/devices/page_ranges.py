# SPDX-License-Identifier: Apache-2.0
"""What every device checks of a copy before it takes it."""

from vllm_tiered.devices.base import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError


def check_copy(src: PageBuffer, src_pages: Pages, dst: PageBuffer, dst_pages: Pages) -> None:
    """Pages of one size, as many to copy as places for them, all inside their buffers.

    Raises:
        IntegrityError: one of these is not so, with the numbers.
    """
    # Dozens of copies are prepared in a step, and all are right: that is seen in one look.
    if (
        len(src_pages.ids) == len(dst_pages.ids)
        and src.page_bytes == dst.page_bytes
        and src_pages.lowest >= 0 <= dst_pages.lowest
        and src_pages.highest < src.num_pages
        and dst_pages.highest < dst.num_pages
    ):
        return
    if len(src_pages.ids) != len(dst_pages.ids):
        raise IntegrityError(f"{len(src_pages)} pages to copy to {len(dst_pages)}")
    if src.page_bytes != dst.page_bytes:
        raise IntegrityError(f"pages of {src.page_bytes} bytes to copy to {dst.page_bytes}")
    for pages, buffer in ((src_pages, src), (dst_pages, dst)):
        if pages.lowest < 0 or pages.highest >= buffer.num_pages:
            raise IntegrityError(
                f"page ids {pages.lowest} to {pages.highest} out of {buffer.num_pages} pages"
            )
