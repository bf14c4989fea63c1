"""Attention: problems, those who can compute them, and who does."""
