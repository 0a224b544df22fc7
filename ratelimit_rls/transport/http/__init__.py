"""The HTTP ports: the JSON API and health checks (`json_api`), debugging (`debug`) and Prometheus metrics."""
