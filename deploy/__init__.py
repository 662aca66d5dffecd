"""Starting a cluster: Ray, configuration files, the `conductor` command.

A Ray that `launch.py` starts listens on loopback alone. Ray has one switch for that, made for
systems whose firewalls ask their users, and reads it when it is imported: so it is set before any
module here is. A Ray that is joined, by `RAY_ADDRESS`, has its own addresses.
"""

import os

if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
