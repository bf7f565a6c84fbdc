"""Audits of a claim: statistics of attacks, canaries, attacks on finished models, and `assert_private`.

It is larger than planned because each bound comes with the published bound that it is compared with, and attacks cover
generators, encoders, releases and federations.
"""
