"""Federated answer sentence selection: PDD-AS2 and what it lacks in privacy. Nothing here knows a transport."""
