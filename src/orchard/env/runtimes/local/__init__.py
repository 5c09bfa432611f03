"""The local runtime: sandboxes on one Linux machine, from namespaces, overlayfs and cgroups, without a daemon."""
