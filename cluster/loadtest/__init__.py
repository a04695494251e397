"""Load tests: what is sent when, what came of it, and what it amounts to.

Knows nothing of how a server works. The simulator shares the traces, the records, the goodput and the report.
"""
