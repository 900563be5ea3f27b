"""One module or package for each framework. `import maskpack` imports none of them."""
