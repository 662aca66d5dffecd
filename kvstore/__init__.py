"""One KV cache for the whole cluster: blocks found by hash."""
