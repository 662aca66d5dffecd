"""The cuda_ipc transport, and how memory of a GPU goes over a wire."""
