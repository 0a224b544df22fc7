"""TLS files: certificates, keys, authorities and revocation lists, reloaded when they change."""
