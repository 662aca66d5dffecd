"""The rdma transport: one-sided work over the nearest NICs, under held grants."""
