"""The test kit: the conformance checks of stores, a store and a proxy that fail on command. Only `store_suite` needs pytest."""
