# SPDX-License-Identifier: Apache-2.0
"""Pages between near memory and pinned far memory, many in one launch; and block tables."""
