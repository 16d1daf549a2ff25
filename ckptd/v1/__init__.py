"""Generated from protos/ by `make protos`. Never edited by hand."""
