"""Where rules come from: each source can be read whole, and says when to read it again."""
