"""Every setting of the three services, declared once: the services and the launcher read the same classes."""
