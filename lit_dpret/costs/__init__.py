"""The cost of a private run: operations, bytes and seconds of a step, without data or a release.

Numbers are *counted* (operations and bytes of weights, exact), *measured* on the machine at hand, or *predicted* from
either, and everything that prints them says which.
"""
