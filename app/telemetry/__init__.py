"""Observers: metrics and logs. The only imports of prometheus_client and structlog."""
