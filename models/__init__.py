"""The domain: tables, verbs and money. Knows nothing of HTTP."""
