# SPDX-License-Identifier: Apache-2.0
"""What runs and times engines, and reports what was measured."""
