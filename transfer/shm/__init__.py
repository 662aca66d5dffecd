"""The shm transport: memory of another process of this host, mapped and copied by threads."""
