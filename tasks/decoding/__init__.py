"""Decoding with a target and a drafter, and what is counted of it.

`acceptance` counts, `greedy` decodes plainly, `speculative` drafts, verifies and rolls back, `replay` computes the same
counts from stored states without the target, `losslessness` compares texts, `figures` draws.
"""
