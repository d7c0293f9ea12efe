"""The schema's history, in order. Reviewed SQL only, and only additions.

The runner and its table of applied migrations are Tortoise's; the operations are ours, because the
built-in ones rebuild SQLite tables and lose rows, indexes and constraints on the way.
"""
