"""The portal: composition, the server, and everything that is not /v1."""
