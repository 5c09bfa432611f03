"""The way out by name: a process that is the DNS server of sandboxes with a list, and carries their connections."""
