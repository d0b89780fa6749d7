"""Measuring kernels beside their peers."""
