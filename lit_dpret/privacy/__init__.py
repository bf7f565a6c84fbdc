"""The promise: a plan, clipping, sampling, noise, accounting, modes, and the ledger in which every release stands first.

Larger than its budget of 10k lines: exact norms for tied weights, convolutions and pairs of records, five sampling laws
under three relations, and a ledger that survives crashes, copies and resumes each need their own proof and refusals.
"""
