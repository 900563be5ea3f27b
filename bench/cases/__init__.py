"""One module, or one folder, a case; none imports another. `bench.harness.registry` finds them."""
