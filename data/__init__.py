"""Tools for shards; a package, so that no installed one of the same name comes first."""
