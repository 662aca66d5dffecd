"""The prefill role of a node: compute a prompt's KV and write it into a reservation."""
