"""Where a request goes. Pure: no asyncio, no sockets, no files, which a test holds."""
