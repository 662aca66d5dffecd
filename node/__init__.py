"""The process that computes: one engine, one transfer agent, its roles, and what it stores and lends."""
