"""The APIs for clients: HTTP, gRPC, keys, text and the web page."""
