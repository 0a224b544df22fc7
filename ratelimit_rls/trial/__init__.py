"""Rules tried before they ship: tests of rules and replayed traffic, on a clock that is turned and never waited for."""
