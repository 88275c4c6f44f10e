"""KV movement between machines: a protocol without sockets, and the transports that carry it."""
