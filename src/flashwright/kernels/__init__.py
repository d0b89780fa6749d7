"""How attention is computed: families of kernels, each described by one folder; pure Python, no GPU, no PyTorch."""
