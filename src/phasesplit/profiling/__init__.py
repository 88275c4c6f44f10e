"""A machine measured until its phase times are known: an engine of this host, or an endpoint of others."""
