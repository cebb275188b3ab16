"""What is measured. Each system answers a `Load` with a `Run`."""
