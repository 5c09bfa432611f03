"""The environment service: sandboxes, commands, files and networks over REST. Imports nothing from above."""
