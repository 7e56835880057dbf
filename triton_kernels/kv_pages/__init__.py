# SPDX-License-Identifier: Apache-2.0
"""Pages between near memory and registered far memory, many in one launch; and block tables."""
