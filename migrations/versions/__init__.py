"""One module for each schema revision, applied in order."""
