"""What clients speak to: HTTP, gRPC, keys, text and the web page."""
