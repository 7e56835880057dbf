# SPDX-License-Identifier: Apache-2.0
"""Files on SSDs: what writes and reads them past the page cache, with checksums."""
