"""The command line: options in, tables or JSON out. Nothing here decides or measures."""
