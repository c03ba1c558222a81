"""Drafts: who gets how many, and what of them held."""
