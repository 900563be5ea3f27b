"""One file for each framework, the only place where its names appear; nothing here is imported by `import maskpack`."""
