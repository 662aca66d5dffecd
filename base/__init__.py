"""Values and rules that every process of the cluster must agree on to the byte."""

import os

# Read when grpc is imported. At its own default it writes a line for each handshake that fails, which anybody
# can have it do without end.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
