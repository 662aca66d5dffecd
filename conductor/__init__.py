"""The service clients speak to: admits, places and streams requests."""
