"""Long contexts whose engine dies, with and without pool files; what pool files cost; prefill and decode apart."""
