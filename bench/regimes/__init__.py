"""Placement rules compared where nobody tuned them: many workloads, clusters and faults of both."""
