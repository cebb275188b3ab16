"""Every setting of the services, declared once: the services and the launcher read the same classes."""
