"""The tcp transport: frames over a few connections, carried by reactor threads, and their listener."""
