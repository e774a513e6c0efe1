"""Decisions: who may ask, how much, whose turn it is. Standard library only."""
