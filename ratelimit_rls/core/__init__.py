"""Pure decision logic: values in, values out. No clock, no I/O, and no library that uses either."""
