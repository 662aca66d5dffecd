"""The fault matrix: real processes are hurt under load, and what clients saw is counted."""
