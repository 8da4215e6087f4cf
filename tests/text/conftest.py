"""Settings of the property tests of this room."""

from hypothesis import settings

# Speed is measured in benchmarks, never asserted: the first example of a test builds its tokenizer.
settings.register_profile("text", deadline=None)
settings.load_profile("text")
