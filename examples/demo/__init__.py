"""The demo: the test-suites of three real projects in 16 parallel sandboxes (`make demo`)."""
