"""Attacks by members of a federation on another silo's queries, from the messages that they receive."""
