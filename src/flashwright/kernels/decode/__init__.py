"""Attention of few query rows to long caches of keys and values."""
