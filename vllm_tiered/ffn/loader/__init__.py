# SPDX-License-Identifier: Apache-2.0
"""How neurons reach the near tier: from far memory, from the store, through bounce buffers."""
