"""Chaos: what hang-ups, `kill -9`, drains, slow providers and clock steps do to a Tollgate of three processes.

Each test drives real processes over real sockets, keeps the history of what every client was told, and
holds the books to it afterwards. `make test` runs a short form of each, `make chaos` the whole one.
"""
