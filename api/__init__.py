"""The /v1 wire, the upstreams behind it, and the metering between them."""
