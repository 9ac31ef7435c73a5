"""What several test modules use: an engine and a clock that a test moves by hand, and chunks that say whose
they are."""
