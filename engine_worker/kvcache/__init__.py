"""The paged KV cache's bookkeeping: which block holds whose tokens. The tensors are the runner's."""
