"""The path of a batch of calls: decode, admit, spend in the store, decide, observe, encode, respond."""
