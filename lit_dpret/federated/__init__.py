"""Federated answer sentence selection: PDD-AS2, with the formal privacy that the paper lacks.

The room is larger than its plan because it holds three protocols, each with its messages, its state on disk and its
refusals: the secure sum against an active server, letters between silos that the server cannot read, and ledgers that
outlive rounds, runs and processes.
"""
