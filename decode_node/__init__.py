"""The decode role of a node: reserve blocks, receive KV, generate tokens."""
