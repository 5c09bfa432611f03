"""Measurements of the environment service, side by side with other tools (`make bench`)."""
