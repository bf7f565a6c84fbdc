"""The privacy core: plan, clipping, sampling, noise, accounting, modes, and the ledger that records every release.

The package is long because exact norms for tied weights, convolutions and pairs of records, five sampling laws under
three relations, and a ledger that survives crashes, copies and resumes each need their own proof and refusals.
"""
