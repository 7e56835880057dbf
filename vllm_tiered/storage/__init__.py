# SPDX-License-Identifier: Apache-2.0
"""Files on SSDs, read and written with direct I/O, with checksums."""
