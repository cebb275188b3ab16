"""The core on the ring: messages in, rows and heartbeats out. Knows no tensor."""
