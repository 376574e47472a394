"""What the tests share: small private runs, and networks of every kind."""
