"""Other ways to run commands apart from the machine, measured in the same run."""
