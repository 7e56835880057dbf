# SPDX-License-Identifier: Apache-2.0
"""Figures and tables of the papers, computed with our models."""
