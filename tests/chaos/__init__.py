"""Processes killed at random moments under load. The seed is in every failure's message."""
