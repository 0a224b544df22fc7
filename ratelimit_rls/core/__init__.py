"""The pure heart: values in, values out. No clock, no I/O, no library that has either."""
