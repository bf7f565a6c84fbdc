"""Federated answer sentence selection: PDD-AS2, with the formal privacy that the paper lacks.

The package holds three protocols, each with its own messages, state on disk and refusals: the secure sum against an
active server, letters between silos that the server cannot read, and ledgers that outlive rounds, runs and processes.
"""
