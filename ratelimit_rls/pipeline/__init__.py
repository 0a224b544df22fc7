"""The path of a batch of calls: look up, admit, spend in the store, decide, observe, encode, respond."""
