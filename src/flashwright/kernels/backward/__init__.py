"""Gradients of attention: of q, k and v, from the gradient of the output."""
