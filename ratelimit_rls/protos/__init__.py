"""Messages of the APIs of Envoy and of our own: .proto files, compiled into one descriptor set, in a private pool."""
