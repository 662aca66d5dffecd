"""Profiles of devices and models that come with the conductor, and the reader of profiles."""
