"""The cost of a private run: operations, bytes and seconds of a step, counted, or measured on slices of the model.

Nothing here reads data or makes a release. Numbers are of three kinds, and everything that prints them says which:
*counted* (operations and bytes of weights, exact), *measured* on the machine at hand, and *predicted* from either.
It stands below callbacks, which count the work of a step, and below the plan task, which measures and predicts.
"""
