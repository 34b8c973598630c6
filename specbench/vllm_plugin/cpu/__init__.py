"""vLLM's V2 model runner without Triton: twins of its kernels and the hooks that place them."""
