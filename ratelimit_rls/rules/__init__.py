"""Loading of rules: documents are read, validated and compiled to a tree. Nothing in this package runs per request."""
