"""Tests of the PTX simulator."""
