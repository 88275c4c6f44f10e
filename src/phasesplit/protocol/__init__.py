"""The wire that gateway, machines, clients and doubles share: types, validation, errors, events, stop strings."""
