"""Attention on PyTorch's tensors: choosing a kernel and launching it, and the same as operators of PyTorch's."""
