"""Rings with fixed ports, for services whose clients must know the port in advance."""

from typing import Any

from bench.harness.ports import free_ports as free_ports
from sluice.launch import Ring


def start_with_metrics(engines: int, detokenizers: int, **options: Any) -> Ring:
    """Start a ring whose services all have a metrics port."""
    port = free_ports(1 + engines + detokenizers)
    ring = Ring(engines=engines, detokenizers=detokenizers, metrics_port=port, **options)
    ring.start()
    return ring
