"""The cost of a private run: operations, bytes and seconds of a step, without data or a release.

Numbers are *counted* (operations and bytes of weights, exact), *measured* on this machine, or *predicted* from either.
Everything that prints them states which.
"""
