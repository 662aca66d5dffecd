"""`python -m bench.papers`: the papers' experiments, peers' policies, and charts, on the simulator."""
