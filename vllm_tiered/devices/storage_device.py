# SPDX-License-Identifier: Apache-2.0
"""Device with a storage tier, which owns the page stores of its buffers."""

from pathlib import Path

from vllm_tiered.devices.base import Copy, Device, Event
from vllm_tiered.devices.pages import PageBuffer, PageCodec, PageError, PageStore
from vllm_tiered.storage.page_file import PageFile


class StorageDevice(Device):
    """Device whose pages may lie in a file or have checksums; base of the CPU's and the GPU's.

    A page store reads and writes such pages. It counts the pages that it lost, and is closed with
    the device.
    """

    def __init__(self) -> None:
        self._stores: list[PageStore] = []

    def storage_buffer(
        self,
        path: str | Path,
        num_pages: int,
        page_bytes: int,
        *,
        codec: PageCodec | None = None,
        deadline_seconds: float = 10.0,
    ) -> PageBuffer:
        file = PageFile(path, num_pages, page_bytes, codec=codec, deadline_seconds=deadline_seconds)
        return self._keep_store(file.buffer())

    def page_errors(self) -> dict[PageError, int]:
        return {kind: sum(store.errors[kind] for store in self._stores) for kind in PageError}

    def storage_failure(self) -> str | None:
        return next((store.failure for store in self._stores if store.failure), None)

    def submit(self, copy: Copy, after: tuple[Event, ...] = ()) -> Event:
        return self.submit_together(((copy, after),))[0]

    def _keep_store(self, buffer: PageBuffer) -> PageBuffer:
        """Return the buffer, and own its page store if it has one."""
        if buffer.store is not None:
            self._stores.append(buffer.store)
        return buffer

    def _close_stores(self) -> None:
        for store in self._stores:
            store.close()
