# SPDX-License-Identifier: Apache-2.0
"""Files on SSDs, written and read past the page cache, with checksums."""
