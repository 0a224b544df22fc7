"""The REST API of administrators: what the database keeps is read and changed here, and everything is accounted for."""
